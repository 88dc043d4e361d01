"""Declare every option of an attack run, once: the command line, the API, records and ``rerun`` read this class."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from typer import Option

from hiddenlab import options as o
from hiddenlab.errors import InputError
from hiddenlab.registry import stages_of
from hiddenlab.utils.schema import CLOSED, LARGEST, Positive, check

# Options of single attacks; one that an attack's constructor does not take is refused.
ATTACK_OPTIONS = ("search", "proposal", "distance", "epsilon", "budget", "setup")
# How files of states are read; they go with --states, or with 'hiddenlab import'.
IMPORT_OPTIONS = (
    "format", "axes", "tensor", "layers", "first_position", "skip_rows", "split", "ids", "mask", "check",
)  # fmt: skip


@dataclass(frozen=True)
class AttackConfig:
    """Hold every option of ``hiddenlab attack`` that can change its result.

    None means the default. Model, layer and stream are resolved before a run is recorded, so that a record can be run
    again with the same result. ``prompt`` holds the text where it came as an argument or on standard input.
    """

    __pydantic_config__ = CLOSED

    prompt: o.PromptArg = None
    prompts: o.PromptsOpt = None
    column: o.ColumnOpt = None
    template: o.TemplateOpt = True
    limit: o.LimitOpt = None
    max_tokens: o.MaxTokensOpt = None
    observation: Annotated[
        str | None,
        Option(
            "--observation",
            metavar="FILE",
            rich_help_panel=o.INPUT,
            help="Attack saved states; see 'hiddenlab capture'.",
        ),
    ] = None
    states: Annotated[
        tuple[str, ...],
        Option(
            "--states",
            metavar="FILE",
            rich_help_panel=o.FOREIGN,
            help="Attack states that another program saved; see 'hiddenlab import'.",
        ),
    ] = ()
    format: o.FormatOpt = "auto"
    axes: o.AxesOpt = None
    tensor: o.TensorOpt = None
    layers: o.LayersOpt = None
    first_position: o.FirstPositionOpt = None
    skip_rows: o.SkipRowsOpt = 0
    split: o.SplitOpt = None
    check: o.CheckOpt = True
    ids: o.IdsOpt = None
    mask: o.MaskOpt = None
    truth: Annotated[
        str | None,
        Option(
            "--truth",
            metavar="FILE",
            rich_help_panel=o.INPUT,
            help="Score against 'capture --truth FILE'; the attack never sees it.",
        ),
    ] = None
    model: o.ModelOpt = None
    layer: o.LayerOpt = None
    stream: o.StreamOpt = None
    defense: o.DefenseOpt = ()
    attack: Annotated[
        str,
        Option(
            "--attack",
            metavar="SPEC",
            rich_help_panel=o.SEARCH,
            help="See 'hiddenlab list attacks'. One of your own: FILE.py.",
        ),
    ] = "vocab-match"
    search: Annotated[
        Literal["speculative", "greedy"] | None,
        Option(
            rich_help_panel=o.SEARCH,
            help="speculative verifies several guessed tokens in one pass; greedy tries one token after another, "
            "as the paper prints it. Default: speculative.",
        ),
    ] = None
    proposal: Annotated[
        Literal["probe+lm", "probe", "lm", "vocab"] | None,
        Option(
            rich_help_panel=o.SEARCH,
            help="What orders the candidates: a probe of the states, a language model, both, "
            "or nothing (vocab). Default: probe+lm.",
        ),
    ] = None
    distance: Annotated[
        Literal["auto", "l1", "l2", "sorted-l1", "sorted-l2"] | None,
        Option(
            rich_help_panel=o.SEARCH,
            help="How states are compared; sorted-l1 and sorted-l2 ignore the order of coordinates. "
            "Default: auto, by the defense.",
        ),
    ] = None
    epsilon: Annotated[
        str | None,
        Option(
            metavar="auto|calibrated|NUMBER",
            rich_help_panel=o.SEARCH,
            help="The distance up to which two states match; auto measures it, calibrated searches for it "
            "as the paper does. Default: auto.",
        ),
    ] = None
    budget: Annotated[
        Positive | None,
        Option(
            metavar="N",
            min=1,
            max=LARGEST,
            rich_help_panel=o.SEARCH,
            help="Candidates a token at most; default: no cap.",
        ),
    ] = None
    setup: Annotated[
        Literal["quick", "full"] | None,
        Option(
            rich_help_panel=o.SEARCH,
            help="quick begins within seconds, and learns from the tokens that it verifies; full first trains a probe "
            "for about a minute, which pays for many prompts. Default: quick.",
        ),
    ] = None
    batch: Annotated[
        Positive | None,
        Option(
            metavar="N",
            min=1,
            max=LARGEST,
            rich_help_panel=o.SEARCH,
            help="Prompts attacked at once, and recorded together; default: the attack's own.",
        ),
    ] = None
    independent: Annotated[
        bool,
        Option(
            "--independent",
            rich_help_panel=o.SEARCH,
            help="Attack each batch as if it were the first: nothing is learned from other prompts. --workers implies "
            "it, so that one process with it gives what many give.",
        ),
    ] = False
    seed: o.SeedOpt = 0
    device: o.DeviceOpt = "auto"
    device_map: o.DeviceMapOpt = None
    dtype: o.DtypeOpt = "float32"
    engine: o.EngineOpt = "auto"
    trust_remote_code: o.TrustOpt = False
    threads: o.ThreadsOpt = None

    def checked(self) -> "AttackConfig":
        """Return the same configuration, every option checked by itself and beside the others.

        Raises:
            InputError: an option has a value that it cannot have, or two contradict each other.
        """
        if self.prompt is not None and self.prompts is not None:
            raise InputError("give a PROMPT or --prompts, not both")
        if self.prompt is not None and self.column is not None:
            raise InputError("--column goes with --prompts; a PROMPT has no columns")
        if not self.template and (self.prompt is not None or self.observation is not None or self.states):
            raise InputError("--no-template goes with --prompts, whose messages it joins")
        given = {"a PROMPT": self.prompt, "--prompts": self.prompts, "--max-tokens": self.max_tokens}
        source = "--observation" if self.observation is not None else "--states" if self.states else None
        if source is not None and (conflicts := [name for name in given if given[name] is not None]):
            raise InputError(f"{source} brings its own states; leave out {', '.join(conflicts)}")
        if self.observation is not None and self.states:
            raise InputError("give --observation or --states, not both")
        if self.truth is not None and source is None:
            raise InputError(
                "--truth goes with --observation or --states; without them the prompts themselves are the truth"
            )
        if self.trust_remote_code and self.model is None:
            raise InputError(
                "--trust-remote-code goes with --model; no code runs of a model that a file names"
            )
        if self.truth is not None and self.ids is not None:
            raise InputError("--ids and --truth both name the prompts' tokens; give one")
        if not self.states and (unread := [name for name in IMPORT_OPTIONS if self._is_given(name)]):
            raise InputError(f"--{unread[0].replace('_', '-')} goes with --states FILE")
        stages = [stage for spec in self.defense for stage in stages_of(spec)]
        return AttackConfig.from_json({**self.to_json(), "defense": stages}, "the configuration")

    def _is_given(self, name: str) -> bool:
        """Return whether a field has another value than its default."""
        return getattr(self, name) != AttackConfig.__dataclass_fields__[name].default

    def to_json(self) -> dict[str, Any]:
        """Return all options by name, as JSON values."""
        return {**asdict(self), "defense": list(self.defense), "states": list(self.states)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the spec") -> "AttackConfig":
        """Rebuild a configuration from the result of ``to_json``, with every option checked.

        Args:
            where: names its place in an error.

        Raises:
            InputError: an option is unknown to this version, or has an invalid value.
        """
        return check(dict(data), cls, where)
