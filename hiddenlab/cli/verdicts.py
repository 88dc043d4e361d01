"""Say first what a verification found: one sentence for 'check', 'score' and 'audit'."""

from collections.abc import Mapping
from typing import Any

from hiddenlab.text import count_of

Verdict = tuple[str, str]  # the sentence, and its style on a terminal
GOOD, BAD, OPEN = "bold green", "bold red", "bold yellow"


def of_check(result: Mapping[str, Any], model: str) -> Verdict:
    """Return the verdict of proofs and fingerprints.

    Args:
        result: of ``hiddenlab.defenses.verification.command.check``. model: what they were checked against.
    """
    counts, total = result["counts"], len(result["requests"])
    requests = count_of(total, "request")
    if counts["rejected"]:
        return (
            f"REJECTED {counts['rejected']} of {requests}: proofs or fingerprints do not fit {model}, are missing or "
            "are damaged.",
            BAD,
        )
    if counts["unchecked"]:
        return (
            f"UNCHECKED {counts['unchecked']} of {requests}: there is no proof or fingerprint to check.",
            OPEN,
        )
    checked = {"exponents": "proofs", "distance": "fingerprints"}  # by a measurement that their check makes
    what = " and ".join(
        name for key, name in checked.items() if any(key in row for row in result["requests"])
    )
    return f"VALID {counts['valid']} of {requests}: the {what} fit {model}.", GOOD


def of_score(result: Mapping[str, Any], level: float) -> Verdict:
    """Return the verdict of a provider's tokens.

    Args:
        result: of ``hiddenlab.defenses.verification.scoring.score``. level: of the test, as a share.
    """
    verdict = result["verdict"]
    if verdict is None or verdict["diverges"] is None:
        return f"NO VERDICT: {result['undecided'].removeprefix('no verdict').lstrip(': ')}.", OPEN
    name = verdict["score"].replace("_", " ")
    means = (
        f"mean {name} {verdict['mean']:.3g}, honest ones {verdict['honest_mean']:.3g}, p = {verdict['p']:.2g}"
    )
    if verdict["diverges"]:
        return f"DIVERGES: the tokens are further from the trusted run than honest ones are ({means}).", BAD
    return (
        f"NO DIVERGENCE found at {100 * level:g} % false positives ({means}). A deviation that moves few tokens can "
        "stay unseen.",
        GOOD,
    )


def of_audit(result: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a directory: how many of its files are in which class."""
    classes = [file["class"] for file in result["files"]]
    files = count_of(len(classes), "file")
    if bad := classes.count("quarantine"):
        return f"QUARANTINE {bad} of {files}: tokens that honest noise does not explain, or a fault.", BAD
    if unsure := classes.count("review"):
        return f"REVIEW {unsure} of {files}: unusual, and not certainly wrong.", OPEN
    return f"QUIET {files}: nothing that honest noise does not explain.", GOOD
