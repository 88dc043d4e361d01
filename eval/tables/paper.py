"""Hold the figures that the paper Hidden No More publishes, for the columns beside ours.

Its models, texts and sizes differ from ours: Gemma is Gemma-2-2B-IT and Llama is Llama-3.1-8B-Instruct, on 1,000 texts
of FineWeb-Edu cut to 50 tokens unless a table says otherwise. Shares and scores are fractions.
"""

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

LAYERS = (1, 6, 11, 16, 21, 26)
GEMMA, LLAMA = "Gemma-2-2B", "Llama-3.1-8B"
METHODS = ("gaussian:sigma=0.01", "gaussian:sigma=0.1", "random-prefix", "int8", "nf4")
PERMUTATIONS = ("identity", "seq-perm", "hidden-perm", "2d-perm")


def published(figures: Mapping[str, T], model: str) -> T | None:
    """Return a model's figure by its name, with or without the owner on the hub, in any case; None without one."""
    by_name = {name.rpartition("/")[2].lower(): figure for name, figure in figures.items()}
    return by_name.get(model.rstrip("/").rpartition("/")[2].lower())


def _by_layer(*values: float) -> dict[int, float]:
    return dict(zip(LAYERS, values, strict=True))


# Tables 1 and 2: share of texts decoded exactly, by channel and model.
EXACT: dict[str, dict[str, dict[int, float]]] = {
    "identity": {GEMMA: _by_layer(1, 1, 1, 1, 1, 1), LLAMA: _by_layer(1, 1, 1, 1, 0.999, 0.997)},
    "seq-perm": {
        GEMMA: _by_layer(1, 0.998, 1, 1, 0.998, 0.998),
        LLAMA: _by_layer(0.997, 1, 1, 1, 1, 1),
    },
    "hidden-perm": {
        GEMMA: _by_layer(1, 1, 1, 0.999, 0.982, 0.980),
        LLAMA: _by_layer(1, 0.985, 0.992, 0.994, 0.989, 0.982),
    },
    "2d-perm": {
        GEMMA: _by_layer(0.999, 0.995, 0.995, 0.992, 0.991, 0.990),
        LLAMA: _by_layer(0.984, 0.978, 0.989, 0.988, 0.980, 0.976),
    },
}

# Tables 9 to 12: thresholds, as L1 distances in each model's own units (layer 32 is Llama's).
EPSILON: dict[str, dict[str, dict[int, float]]] = {
    "identity": {
        GEMMA: _by_layer(22.0, 70.0, 204.0, 293.0, 400.0, 318.0),
        LLAMA: _by_layer(0.6, 7.1, 18.3, 29.0, 76.0, 156.0) | {32: 150.0},
    },
    "seq-perm": {
        GEMMA: _by_layer(12.8, 72.6, 229.0, 301.0, 385.0, 220.0),
        LLAMA: _by_layer(1.4, 3.3, 7.4, 7.4, 26.6, 29.6) | {32: 105.0},
    },
    "hidden-perm": {
        GEMMA: _by_layer(12.5, 25.0, 45.0, 73.0, 118.0, 61.0),
        LLAMA: _by_layer(0.5, 3.5, 3.7, 5.2, 6.3, 9.8) | {32: 30.0},
    },
    "2d-perm": {
        GEMMA: _by_layer(21.0, 26.0, 47.0, 69.0, 118.0, 51.0),
        LLAMA: _by_layer(0.3, 3.0, 9.0, 9.0, 14.0, 14.0) | {32: 45.0},
    },
}

# Tables 18 to 21: ROUGE-L on Gemma by permutation and method.
NOISED: dict[str, dict[str, dict[int, float]]] = {
    "identity": {
        "gaussian:sigma=0.01": _by_layer(0.9263, 0.9273, 0.9070, 0.9175, 0.9232, 0.9070),
        "gaussian:sigma=0.1": _by_layer(0.9177, 0.3271, 0.0856, 0.0587, 0.0977, 0.0485),
        "random-prefix": _by_layer(0.9309, 0.9340, 0.8170, 0.7552, 0.8247, 0.6257),
        "int8": _by_layer(0.8901, 0.8726, 0.8943, 0.8620, 0.8834, 0.8751),
        "nf4": _by_layer(0.8844, 0.8652, 0.8764, 0.8669, 0.8839, 0.8771),
    },
    "seq-perm": {
        "gaussian:sigma=0.01": _by_layer(0.0696, 0.0354, 0.0278, 0.0133, 0.0136, 0.0096),
        "gaussian:sigma=0.1": _by_layer(0.0000, 0.0000, 0.0011, 0.0023, 0.0051, 0.0096),
        "random-prefix": _by_layer(0.1683, 0.0418, 0.0337, 0.0202, 0.0321, 0.0236),
        "int8": _by_layer(0.8167, 0.8236, 0.8479, 0.8568, 0.8283, 0.8236),
        "nf4": _by_layer(0.8157, 0.8409, 0.8138, 0.8116, 0.8250, 0.7956),
    },
    "hidden-perm": {
        "gaussian:sigma=0.01": _by_layer(0.0669, 0.0353, 0.0301, 0.0166, 0.0164, 0.0116),
        "gaussian:sigma=0.1": _by_layer(0.0000, 0.0000, 0.0009, 0.0018, 0.0036, 0.0101),
        "random-prefix": _by_layer(0.1945, 0.0359, 0.0300, 0.0144, 0.0153, 0.0114),
        "int8": _by_layer(0.7544, 0.6696, 0.6667, 0.6325, 0.5029, 0.3848),
        "nf4": _by_layer(0.7497, 0.6420, 0.8138, 0.8116, 0.8250, 0.7956),
    },
    "2d-perm": {
        "gaussian:sigma=0.01": _by_layer(0.0675, 0.0346, 0.0273, 0.0182, 0.0196, 0.0116),
        "gaussian:sigma=0.1": _by_layer(0.0000, 0.0000, 0.0016, 0.0027, 0.0044, 0.0120),
        "random-prefix": _by_layer(0.1919, 0.0361, 0.0297, 0.0140, 0.0151, 0.0117),
        "int8": _by_layer(0.7328, 0.6075, 0.4916, 0.3731, 0.3845, 0.3496),
        "nf4": _by_layer(0.7146, 0.5820, 0.5753, 0.5701, 0.5568, 0.5564),
    },
}

# Table 13: the best layer's ROUGE-L by permutation, and LiveBench relative to the clean model.
BEST: dict[str, dict[str, float]] = {
    "identity": {"identity": 1.00, "seq-perm": 1.00, "hidden-perm": 1.00, "2d-perm": 1.00},
    "gaussian:sigma=0.01": {"identity": 0.93, "seq-perm": 0.07, "hidden-perm": 0.07, "2d-perm": 0.07},
    "gaussian:sigma=0.1": {"identity": 0.91, "seq-perm": 0.01, "hidden-perm": 0.01, "2d-perm": 0.01},
    "random-prefix": {"identity": 0.93, "seq-perm": 0.17, "hidden-perm": 0.19, "2d-perm": 0.19},
    "int8": {"identity": 0.89, "seq-perm": 0.86, "hidden-perm": 0.75, "2d-perm": 0.73},
    "nf4": {"identity": 0.88, "seq-perm": 0.84, "hidden-perm": 0.83, "2d-perm": 0.71},
}
DOWNSTREAM = {
    "identity": 1.0, "gaussian:sigma=0.01": 1.014, "gaussian:sigma=0.1": 0.058, "random-prefix": 1.029,
    "int8": 0.976, "nf4": 0.922,
}  # fmt: skip
# Table 22: LiveBench averages.
LIVEBENCH = {
    "identity": 20.7, "gaussian:sigma=0.01": 21.0, "gaussian:sigma=0.1": 1.2, "random-prefix": 21.3, "int8": 20.2,
    "nf4": 19.1,
}  # fmt: skip

# Tables 5 and 14: ROUGE-L and BLEU of learned reconstruction from layer 1 of Gemma, by (c, alpha).
SHARD_ROUGE = {
    (1, 4): 0.701, (1, 8): 0.467, (1, 12): 0.349, (4, 4): 0.427, (4, 8): 0.290, (4, 12): 0.230,
    (4, 16): 0.173, (8, 24): 0.144,
}  # fmt: skip
SHARD_BLEU = {
    (1, 4): 0.537, (1, 8): 0.229, (1, 12): 0.130, (4, 4): 0.352, (4, 8): 0.133, (4, 12): 0.086, (8, 4): 0.246,
    (8, 8): 0.123, (8, 12): 0.083,
}  # fmt: skip
# Table 15: by layer, for c = alpha = 4 and 8.
SHARD_LAYERS = {4: {1: 0.4268, 11: 0.4627, 21: 0.4021}, 8: {1: 0.2218, 11: 0.2467, 21: 0.2158}}
# Table 16: AttnNodes at layer 1, c = alpha = 8, by m.
SHARD_SPLITS = {2: 0.3057, 3: 0.2643, 4: 0.2376}

# Table 8: mean seconds of ten decodings of 100 tokens, on the authors' GPU; of the largest model by epsilon.
ATTACK_SECONDS: dict[str, int | str] = {
    "Llama-3.2-1B-Instruct": 49, "Gemma-2-2B-IT": 124, "Llama-3.1-8B-Instruct": 69,
    "Gemma-2-27B-IT": "304 (epsilon 30), 124 (epsilon 40)",
}  # fmt: skip
# Table 17: seconds of a forward pass, alpha = 2, on the authors' cluster.
CASCADE_SECONDS = {
    "bert-base": 0.7, "bert-large": 1.3, "meta-llama/Llama-3.2-1B-Instruct": 2.6, "meta-llama/Llama-2-7b-hf": 12.7,
    "meta-llama/Llama-2-13b-hf": 22.7,
}  # fmt: skip

# Seconds and gigabytes of a forward pass of 128 tokens, all layers.
MPC_SOURCE = (
    "paper, Tables 6 and 7: all layers, its machines. It says that it ran MPCFormer with public weights, and that "
    "Puma's figures are from Puma's publication"
)
MPC: dict[str, dict[str, tuple[float, float]]] = {
    "bert-base": {
        "MPCFormer": (55.320, 12.089), "Puma": (33.913, 10.773), "Cascade, alpha 1": (0.32, 0.009),
        "Cascade, alpha 4": (0.59, 0.038), "Cascade, alpha 8": (0.74, 0.076),
    },
    "bert-large": {
        "MPCFormer": (141.222, 32.577), "Puma": (73.720, 27.246), "Cascade, alpha 1": (1.01, 0.025),
        "Cascade, alpha 4": (1.57, 0.101), "Cascade, alpha 8": (1.58, 0.203),
    },
}  # fmt: skip
