"""Say of every experiment and bench which question it answers, how long it takes, and what it needs.

A time is on record: in ``docs/``, in a measured table, or in the docstring of the experiment. It is of the built-in
model at the default settings, on one or two CPU cores. Seconds of a measured table are of the attacks alone.
``None`` means that no such time is on record.
"""

from collections.abc import Mapping
from typing import NamedTuple

RAY = "the Ray extra (pip install 'hiddenlab[ray]')"
DCOR = "the package dcor (pip install 'hiddenlab[schemes]')"
CRYPTEN = "CrypTen (make mpc)"


class Effort(NamedTuple):
    """What running an experiment or bench takes.

    Attributes:
        time: a rough duration, ``None`` where none is on record.
        needs: what is needed beyond the package itself.
    """

    time: str | None = None
    needs: str = ""


PLAIN = Effort()
# docs/explanation/protocols.md gives an hour for these together. Each was stopped after a minute, unfinished, on one
# thread beside other work.
WITHIN_AN_HOUR = Effort("minutes")
# docs/log/008-permuting-schemes.md: 39 minutes for one infiller at one layer, on one thread.
TRAINED = Effort("about 40 minutes of training, then the attacks")

_CATALOG: dict[str, dict[str, dict[str, Effort]]] = {
    "experiments": {
        "What comes back from raw states?": {
            "table-1": PLAIN,
            "table-8": PLAIN,
            "table-9-12": PLAIN,
            "baselines": PLAIN,
            "ablation": PLAIN,
        },
        "What does a secret order of rows or coordinates hide?": {
            # docs/log/011-permuted-every-layer.md: 43 and 49 s a prompt at layers 6 and 11 (2d-perm), 50 prompts each;
            # docs/log/012-prompts-from-fingerprints.md: a third less at layer 6 since then.
            "table-2": Effort("about an hour"),
            "order": PLAIN,
            # docs/log/059-ensemble-time.md: 3 to 5 s a prompt without noise at layer 1, 16 to 18 s behind noise.
            "invariants": Effort("hours: two to six minutes a row at layer 1"),
        },
        "Which defense holds?": {
            "leaderboard": Effort("hours: ten to twenty minutes a defense and layer"),
            "ensemble": Effort("about two hours"),
            "trade-off": Effort("hours: up to twenty minutes a row"),
        },
        "What do noise and quantization hide, and what do they cost?": {
            "table-13": PLAIN,
            "table-18": PLAIN,
            "table-19": PLAIN,
            "table-20": PLAIN,
            "table-21": PLAIN,
            "table-22": PLAIN,
            # docs/results/tables/noise-001.json: over 20,000 s for beam decoding at sigma 0.01 alone.
            "noise": Effort("hours"),
            # docs/results/tables/noise-utility.json: 143 s for one prompt behind each defense, 50 prompts.
            "noise-utility": Effort("hours"),
        },
        "What does a Cascade node learn?": {
            "partial-sums": Effort("half an hour"),  # docs/explanation/cascade.md
            "gap": Effort("minutes"),  # docs/results/tables/gap.json: 853 s
            "gap-plans": PLAIN,
            "hardening": PLAIN,
            "hardened-shards": PLAIN,
            "secret-coordinates": PLAIN,
            # docs/log/007-cascade-partial-sums.md: 40 minutes of training on one thread.
            "figure-2": TRAINED,
            "table-5": TRAINED,
            "table-15": Effort("about 40 minutes of training for each of three layers, then the attacks"),
            "table-16": TRAINED,
            "plan": PLAIN,
            "plans": PLAIN,
            "after-mpc": Effort(needs=CRYPTEN),
        },
        "How fast is Cascade?": {
            "table-17": Effort(needs=RAY),
        },
        "What do schemes with secret, permuted weights hide?": {
            "schemes": WITHIN_AN_HOUR,
            "closed-weights": WITHIN_AN_HOUR,
            "permuted-model": WITHIN_AN_HOUR,
            "unique-rows": Effort("seconds"),
            "substitution": WITHIN_AN_HOUR,
            "revealed": WITHIN_AN_HOUR,
        },
        "What do random projections of states hide?": {
            "projections": WITHIN_AN_HOUR,
            "theorem-j1": WITHIN_AN_HOUR,
            "theorem-j3": Effort("seconds", DCOR),
            "distance-correlation": Effort("minutes", DCOR),
        },
        "Does an audit find a cheating provider?": {
            "detection": PLAIN,
            "areas": PLAIN,
            "pooling": PLAIN,
            "score-tables": PLAIN,
            "providers": PLAIN,
            "bands": PLAIN,
            "activations": PLAIN,
            "fingerprint-cost": PLAIN,
            "fingerprint-pareto": PLAIN,
            "toploc": PLAIN,
            "toploc-errors": PLAIN,
            "toploc-moduli": Effort("seconds"),
            "tampering": Effort("about 45 minutes"),  # docs/log/035-faults-in-use.md: 43 minutes
        },
        "What does an audit reveal of the prompts?": {
            "leak": Effort("hours"),  # eval/tables/leak.py, of all rows
            "leak-pareto": PLAIN,
        },
        "How much can a provider smuggle out?": {
            "exfiltration": PLAIN,
            "exfiltration-pareto": PLAIN,
            "exfiltration-frontier": PLAIN,
            "exfiltration-hidden-seed": PLAIN,
            "exfiltration-game": PLAIN,
            "exfiltration-forks": PLAIN,
            "exfiltration-scores": PLAIN,
            "exfiltration-posterior": PLAIN,
            "exfiltration-thresholds": PLAIN,
        },
        "Which models does the lab run rightly?": {
            "architectures": PLAIN,
            # docs/log/038-bring-your-own.md: 28 s; more than a minute on one thread beside other work.
            "encoders": Effort("about a minute"),
        },
        "Does the lab name what is wrong with given states?": {
            # docs/log/038-bring-your-own.md: 1 minute for the random model; docs/log/039-closed-form-probe.md: 16 to
            # 86 s for each of 20 faults on the built-in one.
            "diagnosis": Effort("minutes"),
        },
    },
    "benches": {
        "How fast is an attack?": {
            "attack": PLAIN,
            "first": PLAIN,
            "chains": PLAIN,
            "kv-cache": Effort("seconds"),
        },
        "What does Cascade cost?": {
            "cascade": Effort(needs=RAY),
            "cascade-decode": Effort(needs=RAY),
            "cascade-largest": Effort(needs=RAY),
            "cascade-tls": PLAIN,
            "serving": Effort(needs=RAY),
            "throughput": Effort("minutes", RAY),
        },
        "What happens when a Cascade node breaks?": {
            "cascade-faults": Effort("minutes", RAY),
        },
        "How does Cascade compare with secret sharing?": {
            "mpc": Effort(needs="CrypTen and SPU (make mpc), and " + RAY),
        },
    },
}


def catalog(kind: str) -> Mapping[str, Mapping[str, Effort]]:
    """Return the experiments or benches by the question that they answer, in the order in which they are listed.

    Args:
        kind: ``experiments`` or ``benches``.
    """
    return _CATALOG[kind]
