"""Split rows of only some positions at the first gap, as one node of a distributed scheme sees them.

See the paper, section 7 and appendix C. Vocabulary matching goes from left to right and needs every earlier token. A
gap of g unknown tokens would take V^(g+1) candidates, so the search ends at the first gap; the rows behind it get the
probe's prediction from each row alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from hiddenlab.errors import NotApplicableError
from hiddenlab.preparations import as_whole
from hiddenlab.proposals.probe import Probe
from hiddenlab.summary import NO_STATE
from hiddenlab.types import AttackResult, Observation, TokenPrediction


def leading_rows(observation: Observation) -> int:
    """Return the number of rows before the first gap."""
    positions = observation.info.positions
    if positions is None:
        return len(observation.states)
    return next((i for i, position in enumerate(positions) if position != i), len(positions))


def before_gap(observation: Observation) -> Observation | None:
    """Return the rows before the first gap, None where there is none."""
    n = leading_rows(observation)
    if n == 0:
        return None
    return Observation(observation.states[:n], as_whole(observation.info))


def behind_gap(observation: Observation, probe: Probe | None) -> list[TokenPrediction]:
    """Return the probe's best guess for each row behind the first gap, unverified.

    Raises:
        NotApplicableError: there are such rows and no probe.
    """
    first = leading_rows(observation)
    rows: Float[Tensor, "rows d"] = observation.states[first:]
    if not len(rows):
        return []
    if probe is None:
        positions: Sequence[int] = observation.info.positions or ()
        raise NotApplicableError(
            f"row {first} is of position {positions[first]}, behind tokens that no row shows; matching cannot pass "
            "the gap, and without a probe nothing else reads the row"
        )
    _, tokens = probe.shortlist(rows.float(), 1)
    return [
        TokenPrediction(token, first + i, float("inf"), None, 0, False)
        for i, token in enumerate(tokens[:, 0].tolist())
    ]


def with_rest(
    recovery: AttackResult | None, rest: Sequence[TokenPrediction], observation: Observation
) -> AttackResult:
    """Join what matching found before the first gap and the guesses behind it."""
    if not rest:
        assert recovery is not None
        return recovery
    positions = observation.info.positions or ()
    reason = f"gap before position {positions[rest[0].row]}"
    if recovery is None:
        return AttackResult(tuple(rest), 0, 0, 0.0, reason, positions=positions)
    tokens = (*recovery.tokens, *rest)
    if recovery.stop_reason == NO_STATE:  # more important than where rows are missing
        reason = NO_STATE
    return replace(recovery, tokens=tokens, stop_reason=reason, positions=positions)
