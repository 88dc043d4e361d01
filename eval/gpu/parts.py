"""List the parts of the GPU program, the most important first."""

from itertools import product

from hiddenlab.eval.gpu.program import Cell, Part, Setting

TINY = (
    "llama",
    "gemma2",
    "gemma3_text",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "phi3",
    "gpt2",
    "gpt_neox",
    "olmo2",
)
DTYPES = ("float32", "bfloat16")
PROMPTS = 8


def _shapes(setting: Setting) -> tuple[str, ...]:
    return ("tiny", "tiny-gemma") if setting.rehearse else ("8b", "1b", "27b")


def _real(setting: Setting) -> bool:
    """Return whether the built-in model is available, and no tiny one replaces it."""
    return setting.model is not None and not setting.rehearse


def _ceilings(setting: Setting) -> list[Cell]:
    return [{"what": what} for what in ("bfloat16", "float32", "copy")]


def _engine(setting: Setting) -> list[Cell]:
    models = TINY[:2] if setting.rehearse else TINY
    if _real(setting):
        models = (*models, "builtin")
    return [
        {"model": model, "dtype": dtype, "way": way}
        for dtype, way, model in product(DTYPES, ("one product", "each request"), models)
    ]


def _components(setting: Setting) -> list[Cell]:
    names = ["distances", "learning from failures"]
    if setting.model is not None:
        names += ["screen", "probe training"]
    return [{"what": name} for name in names]


def _sharded(setting: Setting) -> list[Cell]:
    models = ("llama", "bert") if setting.rehearse else ("llama", "gemma2", "qwen3_moe", "gpt2", "bert")
    return [
        {"model": model, "dtype": dtype, "alpha": alpha}
        for dtype, model, alpha in product(DTYPES, models, (1, 3))
    ]


def _attacks(setting: Setting) -> list[Cell]:
    if setting.model is None:
        return []
    if setting.rehearse:
        return [{"channel": name, "prompts": 1, "options": {}} for name in ("raw", "both permuted")]
    cells: list[Cell] = [
        {"channel": channel, "prompts": PROMPTS, "options": {}}
        for channel in (
            "raw",
            "rows permuted",
            "columns permuted",
            "both permuted",
            "noise 0.01",
            "int8",
            "nf4",
        )
    ]
    # Measure what packing several prompts in a pass, and screening in bfloat16, gain.
    cells.append({"channel": "raw", "prompts": PROMPTS, "options": {"batch": 1}})
    cells.append({"channel": "columns permuted", "prompts": PROMPTS, "options": {"screen": False}})
    return cells


def _branch(setting: Setting) -> list[Cell]:
    counts, prefixes = ((16, 64), (16,)) if setting.rehearse else ((2048, 512, 64, 4), (128, 16, 1024))
    return [
        {"shape": shape, "candidates": count, "prefix": prefix}
        for shape, prefix, count in product(_shapes(setting), prefixes, counts)
    ]


def _ways(setting: Setting) -> list[Cell]:
    return [
        {"what": what, "shape": shape}
        for shape, what in product(
            _shapes(setting)[:2], ("prefill of 8 prompts", "16 candidates behind 8 prefixes")
        )
    ]


def _screen(setting: Setting) -> list[Cell]:
    shapes = _shapes(setting)[:2]
    return [{"shape": shape} for shape in (*shapes, *(["builtin"] if _real(setting) else []))]


def _recovery(setting: Setting) -> list[Cell]:
    budget, depths = (16, ("quarter",)) if setting.rehearse else (64, ("quarter", "half"))
    return [
        {"shape": shape, "depth": depth, "search": search}
        for depth, shape, search in product(depths, _shapes(setting), ("ours", f"greedy:{budget}"))
    ]


def _vocabulary(setting: Setting) -> list[Cell]:
    if setting.rehearse:
        return [{"shape": "tiny", "layer": 2, "pass_tokens": 256}]
    cells: list[Cell] = []
    for pass_tokens in (2048, 8192):
        cells += [{"shape": shape, "layer": layer, "pass_tokens": pass_tokens}
                  for shape, layer in (("8b", 8), ("1b", 8), ("27b", 12))]  # fmt: skip
    if _real(setting):
        cells.append({"shape": "builtin", "layer": 11, "pass_tokens": 2048})
    return cells


def _noise(setting: Setting) -> list[Cell]:
    return [] if setting.model is None else [{"sigma": 0.1, "prompts": 1 if setting.rehearse else 4}]


def _cascade(setting: Setting) -> list[Cell]:
    if setting.model is None:
        return []
    lengths, dtypes = ((16,), DTYPES[:1]) if setting.rehearse else ((128, 1024), ("bfloat16", "float32"))
    return [
        {"tokens": tokens, "alpha": alpha, "dtype": dtype}
        for dtype, tokens, alpha in product(dtypes, lengths, (1, 2, 4))
    ]


def _profile(setting: Setting) -> list[Cell]:
    shape = _shapes(setting)[0]
    cells: list[Cell] = [{"what": "candidates", "shape": shape}, {"what": "attack", "shape": shape}]
    if setting.model is not None:
        channels = ("raw",) if setting.rehearse else ("raw", "columns permuted")
        cells += [{"what": "real attack", "shape": channel} for channel in channels]
    return cells


PARTS = (
    Part(
        "ceilings", "What can the card do?",
        "The matrix rate is that of a product of two random 8192 × 8192 matrices. The copy counts bytes read and "
        "written.",
        60, "hiddenlab.eval.gpu.speed:ceilings", _ceilings,
    ),
    Part(
        "engine", "Is the engine right on the card?",
        "Relative error of states against one full forward of the plain model on the CPU in float32: the largest "
        "of a check in float32, the median in bfloat16 (a router that rounds may choose other experts). The "
        "checks: one prompt (encode), alternatives behind a prefix (branch), one of them kept and continued "
        "(commit), two prompts in one pass (packed), parts of a pass kept (keep), many short chains (together). "
        "'plain model' is the plain model's own error on the card in the same dtype. 'way' says how a pass "
        "attends (docs/how-to/gpu.md). An error counts as equal up to 1e-4 in float32, and up to twice the plain "
        "model's (0.02 to 0.2) in bfloat16.",
        150, "hiddenlab.eval.gpu.correctness:engine", _engine,
    ),
    Part(
        "components", "Are the other functions right on the card?",
        "Distances, learning from failed candidates, the bfloat16 screen and the training of a probe, against "
        "the same on the CPU. 'top1' is the share of rows whose token the probe names first.",
        90, "hiddenlab.eval.gpu.correctness:component", _components,
    ),
    Part(
        "cascade-right", "Is Cascade right on the card?",
        "Relative error of the sharded model's outputs against the plain model on the CPU in float32, counted as "
        "above. 'alpha' is the number of nodes that share the tokens.",
        60, "hiddenlab.eval.gpu.correctness:cascade", _sharded,
    ),
    Part(
        "branch", "How fast does one batch of candidates run?",
        "A model of Llama-3.2-1B's, Llama-3.1-8B's or Gemma-2-27B's shape with random weights, a quarter of its "
        "layers, bfloat16. The share is of the measured matrix rate; only products with weights and attention "
        "are counted. The peak is all memory held on the card, over the weights.",
        75, "hiddenlab.eval.gpu.speed:branch", _branch,
    ),
    Part(
        "ways", "What does attending as one product bring?",
        "The same passes in one process: each request attends by itself, and all attend as one product, which a "
        "card does wherever a pass is small. Prompts of 50 tokens, a quarter of the layers, bfloat16.",
        40, "hiddenlab.eval.gpu.speed:ways", _ways,
    ),
    Part(
        "screen", "What does screening in bfloat16 bring?",
        "A batch of 512 candidates, a quarter of the layers: all in float32, and all in bfloat16 with 16 of them "
        "again in float32.",
        30, "hiddenlab.eval.gpu.speed:screen", _screen,
    ),
    Part(
        "recovery", "How long does an attack on 100 tokens take?",
        "Times only. The weights are random, so that no language model can propose tokens, and the probe reads "
        "such states better than real ones. bfloat16, one prompt, raw states. 'ours' has a probe that was "
        "trained on the card (setup). 'greedy:N' is the loop that the paper 'Hidden No More' prints, with "
        "candidates in the vocabulary's order, at most N a token; one more is run to settle on the nearest. It "
        "rarely finds the token, so its seconds are not those of a recovery. 'over prefill' is the attack's time "
        "over one forward of the same prompt. The paper's seconds are of the real model (Table 8), on another "
        "card, with the language model's proposals.",
        150, "hiddenlab.eval.gpu.speed:recovery", _recovery,
    ),
    Part(
        "vocabulary", "How long does a whole vocabulary at one position take?",
        "All tokens as candidates behind 64 tokens, in passes of so many ('pass tokens'), and the distance of "
        "each to one row.",
        75, "hiddenlab.eval.gpu.speed:vocabulary", _vocabulary,
    ),
    Part(
        "attacks", "Does the card recover what the CPU recovers?",
        "The built-in model, layer 11, float32, the first prompts of the shipped set, 50 tokens each. 'same as "
        "cpu' counts prompts whose recovered tokens are those that a CPU recovered. 'verified' is the share of "
        "tokens whose state lies within the measured threshold; 'wrong verified' counts those of them that are "
        "wrong. 'over prefill' is the attack's time over one forward of the same prompts. The setup trains what "
        "is not cached.",
        300, "hiddenlab.eval.gpu.attacks:attack", _attacks,
    ),
    Part(
        "profile", "Where does the time go?",
        "The slowest kernels, and the share of the time in which the card runs none.",
        90, "hiddenlab.eval.gpu.profiling:operations", _profile,
    ),
    Part(
        "cascade", "What does sharding cost on one card?",
        "The built-in model, all nodes threads of one process. 'alpha' is the number of nodes that share the "
        "tokens. 'difference' is the largest relative difference from the plain model's logits on the same card.",
        90, "hiddenlab.eval.gpu.sharding:cascade", _cascade,
    ),
    Part(
        "noise", "How many noised and shuffled prompts a minute?",
        "The built-in model, layer 6, rows shuffled, Gaussian noise on the input embeddings, beam decoding.",
        200, "hiddenlab.eval.gpu.attacks:noise", _noise,
    ),
)  # fmt: skip
