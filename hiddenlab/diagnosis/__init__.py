"""Say what observed rows are when they are no states of the site that they claim to be.

One look compares the rows with every place of the model, under every layout, and with tokens of its own choice. It
needs no truth and answers with one sentence. What it calls exact, the model has reproduced.
"""

from dataclasses import dataclass

from hiddenlab.diagnosis.look import Finding, Look, Sample
from hiddenlab.diagnosis.words import resembled, told
from hiddenlab.errors import NotApplicableError
from hiddenlab.input_noise import is_noisy
from hiddenlab.models import TruncatedModel
from hiddenlab.row_facts import EXTRA, KEPT, NOISE, ROW_SPACE
from hiddenlab.types import Observation, ObservationInfo, Progress, Site, silent


@dataclass(frozen=True)
class Diagnosis:
    """What rows are.

    Attributes:
        fault: what is wrong, as one word: layout, place, missing (first rows), several (prompts), padding, numbers
            (dtype or quantization), weights, unlike (nothing), width; None where the rows are what they claim to be.
        sentence: the same in words, with the option that would be right. site: where the rows lie, None where no
            attack reads them there. starts: the first rows of prompts. exact: rows were reproduced within rounding.
    """

    fault: str | None
    sentence: str
    site: Site | None = None
    starts: tuple[int, ...] = (0,)
    exact: bool = False

    @property
    def certain(self) -> bool:
        """Whether the rows are something else than they claim, beyond doubt: an attack would find nothing."""
        return self.exact and self.fault in ("layout", "place", "padding")

    def __str__(self) -> str:
        return self.sentence


def diagnose(
    observation: Observation, model: TruncatedModel, *, seed: int = 0, progress: Progress = silent
) -> Diagnosis:
    """Say what the rows of an observation are: of which place of the model, which layout, from which row on.

    Rows that are what they claim are known after a few seconds. Otherwise the whole model is loaded, and every place in
    it is compared.

    Args:
        observation: states without noise or permutation. model: the weights that it names, as an attack loads them.
        seed: of the tokens that are run.

    Raises:
        NotApplicableError: the rows passed a defense that changes them.
    """
    info = observation.info
    changed = info.facts.keys() & {NOISE, EXTRA, ROW_SPACE, KEPT}
    if changed or info.rows_permuted or info.columns_permuted or is_noisy(info) or info.prefix_tokens:
        raise NotApplicableError("rows that passed a defense cannot be told apart; say what they are by hand")
    if info.positions is not None:
        raise NotApplicableError(
            "rows of some positions are not looked at, since what stands before them is missing"
        )
    progress("looking at the rows", 0, 2)
    sample = Sample(model, seed)
    first = Look(observation, model, sample, claimed_only=True)
    if first.claimed is None and first.unread(info.site):
        raise NotApplicableError(f"{info.site} is not among the places that are looked at")
    finding = first.finding()
    progress("looking at the rows", 1, 2)
    if finding is None or told(finding, info):
        dtype = str(model.dtype).removeprefix("torch.")
        whole = model.sibling(None, stream="resid", engine="plain", dtype=dtype)
        look = Look(observation, whole, sample)
        if not look.likelihoods:
            width = observation.states.shape[1]
            return Diagnosis("width", f"no place in {model.ref.name} has vectors {width} wide")
        finding = look.nearest(finding.chain) if finding is not None else None
        finding = look.finding() if finding is None else finding
        if finding is None:
            fault, sentence, site = resembled(look, info.site, model.ref.name)
            return Diagnosis(fault, sentence, site)
    progress("looking at the rows", 2, 2)
    return _diagnosis(finding, info)


def _diagnosis(finding: Finding, info: ObservationInfo) -> Diagnosis:
    faults = told(finding, info)
    if not faults:
        explained = len(finding.chain.tokens)
        rows = "first row fits" if explained == 1 else f"first {explained} rows fit"
        sentence = f"the rows are {info.site}: the {rows} {info.model} within rounding"
        return Diagnosis(None, sentence, info.site, finding.starts, finding.exact)
    words, sentences = zip(*faults, strict=True)
    return Diagnosis(words[0], "; ".join(sentences), finding.place.site, finding.starts, finding.exact)
