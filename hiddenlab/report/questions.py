"""Order the tables of a report by the question that they answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question, with the names of the experiments that answer it; ``name`` stands in the page's file name."""

    name: str
    text: str
    experiments: tuple[str, ...]


QUESTIONS = (
    Question(
        "states",
        "Which prompts come back from raw and from permuted states, and at what cost?",
        ("table-1", "table-2", "table-8", "table-9-12", "baselines", "ablation"),
    ),
    Question("defenses", "Which defense holds, at what cost?", ("leaderboard", "trade-off", "ensemble")),
    Question(
        "noise",
        "Does noise or quantization protect a prompt?",
        ("table-13", "table-18", "table-19", "table-20", "table-21", "table-22", "noise", "order"),
    ),
    Question(
        "sharding",
        "What does one node learn when Cascade spreads a prompt over many?",
        (
            "figure-2", "table-5", "table-15", "table-16", "table-17", "plan", "plans", "gap", "gap-plans",
            "partial-sums", "hardening", "hardened-shards", "secret-coordinates", "after-mpc",
        ),
    ),
    Question(
        "protocols",
        "What do protocols that permute states reveal to their servers?",
        (
            "schemes", "closed-weights", "permuted-model", "substitution", "unique-rows", "revealed", "projections",
            "distance-correlation", "theorem-j1", "theorem-j3", "invariants",
        ),
    ),
    Question(
        "verification",
        "Does a check of its answers reveal that a provider changed the model?",
        (
            "detection", "activations", "fingerprint-pareto", "fingerprint-cost", "areas", "pooling", "score-tables",
            "providers", "bands", "toploc", "toploc-errors", "toploc-moduli", "tampering",
        ),
    ),
    Question("fingerprints", "What do fingerprints for such checks reveal of a prompt?", ("leak",)),
    Question("exfiltration", "Can a model hide data in its answers?", ("exfiltration",)),
    Question(
        "models", "Which models can be read, and which faults are named?", ("architectures", "encoders", "diagnosis")
    ),
)  # fmt: skip
OTHER = Question("other", "Further experiments", ())
ASSESSED = Question("defenses", "Does a defense hold?", ())
RUNS = Question("runs", "What came back in single runs?", ())


def question_of(experiment: str) -> Question:
    """Return the question of an experiment, whose name may go on: ``table-1-opener`` belongs to ``table-1``."""
    known = {name: question for question in QUESTIONS for name in question.experiments}
    matches = [name for name in known if experiment == name or experiment.startswith(f"{name}-")]
    return known[max(matches, key=len)] if matches else OTHER
