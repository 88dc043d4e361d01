"""Put what was found about rows into one sentence, with the option that would be right."""

from hiddenlab.diagnosis.hypotheses import AS_THEY_ARE, Hypothesis
from hiddenlab.diagnosis.look import Finding, Look
from hiddenlab.diagnosis.places import Place
from hiddenlab.types import QUANTIZATIONS, ObservationInfo, Site

ALIKE = 0.75  # rows whose distance is this share of that of unrelated rows come from a place
ROUNDED = 0.1  # distance that rounding explains which the channel says, relative to a row's length
MISSING = (
    "the first rows are missing, as behind a cached prefix (save every row, or name the position of the first row: "
    "--first-position N --attack missing-tokens), or positions counted the padding of a batch (give the model "
    "position_ids that begin at the first token)"
)
OTHER = (
    "they come from other weights of the same architecture, such as a fine-tuned model, from half precision or "
    "quantized weights, or were changed afterwards; name the model with --model, or what changed them with --defense "
    "(dtype:bfloat16, int8 …)"
)


def told(finding: Finding, info: ObservationInfo) -> list[tuple[str, str]]:
    """Return what is wrong with rows that were explained: a word for each fault, and what to do; empty if nothing is.

    Args:
        info: what the rows claim to be.
    """
    faults, starts, claimed = list[tuple[str, str]](), finding.starts, info.site
    if finding.layout.name != AS_THEY_ARE:
        faults.append(
            ("layout", f"the numbers are not in the order [tokens, width]: {finding.layout.way_out}")
        )
    if finding.place.site != claimed:
        faults.append(
            ("place", f"the rows are {finding.place}, not {claimed}: {_way_out(finding.place, claimed)}")
        )
    if finding.chain.before:
        faults.append(
            (
                "missing",
                "the row of the first token, a special one, is missing: save every row, or attack with "
                "--first-position 1 --attack missing-tokens",
            )
        )
    elif len(starts) > 1:
        parts = ", ".join(map(str, starts[:-1])) + f" and {starts[-1]}"
        split = ",".join(str(start - starts[0]) for start in starts[1:])
        skip = f"--skip-rows {starts[0]} " if starts[0] else ""
        said = f"rows {parts} are each like a first token's: if several prompts are joined, use {skip}--split {split}"
        faults.append(
            ("several", f"{said}; tokens that see nothing before them (a window, a chunk) look so too")
        )
    elif starts[0]:
        said = f"the prompt begins in row {starts[0]}, behind rows of padding"
        faults.append(("padding", f"{said}: use --skip-rows {starts[0]}"))
    if finding.numbers and finding.numbers not in (info.provider_dtype, info.quantization):
        quantized = finding.numbers in QUANTIZATIONS
        kind = finding.numbers if quantized else f"dtype:{finding.numbers}"
        does = "computes in" if quantized else "computes in, or saves,"
        faults.append(("numbers", f"the provider {does} {finding.numbers}: use --defense {kind}"))
    elif not finding.exact and not (info.channel and finding.distance <= ROUNDED):
        distance = f"{finding.distance:.2g} of their length"
        said = f"the rows are near states of {info.model} and not equal to them ({distance})"
        faults.append(("weights", f"{said}: {OTHER}"))
    return faults


def resembled(look: Look, claimed: Site, name: str) -> tuple[str, str, Site | None]:
    """Return what rows resemble that no token reproduces: a word for the fault, a sentence, and the site."""
    if len(look.normed) == 1 and (place := look.normed[0]).site != claimed:
        said = f"the rows are {place}, not {claimed}, since they have the lengths that this norm gives"
        return "place", f"{said}: {_way_out(place, claimed)}", place.site
    shares = look.shares()
    best, own = min(shares, key=lambda h: shares[h]), look.own[0] if look.own else None
    if own is not None and shares[own] <= max(ALIKE, 1.1 * shares[best]):
        best = own
    if shares[best] <= ALIKE:
        close = f"at {shares[best]:.2f} of the distance of unrelated tokens"
        if (otherwise := _otherwise(best, claimed)) is not None:
            fault, way_out = otherwise
            said = f"the numbers resemble {best.place} {close}, which proves nothing: perhaps {way_out}"
            return (
                fault,
                f"{said}; or they are {claimed}, changed afterwards (scaled, noised)",
                best.place.site,
            )
        if bool(look.places[best.place].looks_first(best.rows[:1]) < 0):
            sentence = (
                f"the rows resemble {best.place} {close}, but no row is that of a first token: {MISSING}"
            )
            return "missing", sentence, best.place.site
        sentence = (
            f"the rows resemble {best.place} {close}; a quick look found no tokens of {name} that give them. "
            f"Perhaps {OTHER}"
        )
        return "weights", sentence, best.place.site
    if own is not None and look.likely(own):
        return (
            "missing",
            f"the rows spread like {claimed}, but no row is that of a first token: {MISSING}",
            claimed,
        )
    likeliest = next(iter(look.likelihoods))
    nearest = likeliest.place
    if look.clearly(likeliest) and (otherwise := _otherwise(likeliest, claimed)) is not None:
        fault, way_out = otherwise
        said = f"no token that was tried gives these rows, but by mean and spread they are {nearest}"
        return fault, f"{said}: {way_out}", nearest.site
    return (
        "unlike",
        f"no token that was tried gives these rows in {name}; by mean and spread {nearest} is the nearest place. Check "
        "that they come from this model, and that every row is a token of one prompt",
        None,
    )


def _otherwise(hypothesis: Hypothesis, claimed: Site) -> tuple[str, str] | None:
    """Return whether layout or place are other ones than claimed, and what to do; None if neither is."""
    if hypothesis.layout.name != AS_THEY_ARE:
        return "layout", hypothesis.layout.way_out
    if hypothesis.place.site != claimed:
        return "place", _way_out(hypothesis.place, claimed)
    return None


def _way_out(place: Place, claimed: Site) -> str:
    """Return what to do about rows of another place."""
    if place.site is None:
        where = f"the output of layer {claimed.layer} (hidden_states[{claimed.layer}] in transformers)"
        return f"save {where if claimed.stream == 'resid' else claimed} instead"
    layer = f"--layer {place.site.layer}" if place.site.layer != claimed.layer else ""
    stream = f"--stream {place.site.stream}" if place.site.stream != claimed.stream else ""
    return f"use {' '.join(filter(None, (layer, stream)))}"
