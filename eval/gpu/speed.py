"""Time candidates, whole vocabularies and whole attacks on models of full size (random weights, see ``shapes``)."""

from typing import Any
from unittest import mock

import torch

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.batch import time_prefill
from hiddenlab.channels import Channel
from hiddenlab.eval.gpu.shapes import SHAPES, branch_flops, draw_truncated, weights_mb
from hiddenlab.eval.gpu.work import Figures, Lab
from hiddenlab.matching.distance import Matcher
from hiddenlab.matching.screening import Screen
from hiddenlab.models import Prefix, Request, TruncatedModel, engine, load_model
from hiddenlab.utils.random import generator

SEED = 0
COPY_BYTES = 1 << 33


def ceilings(lab: Lab, *, what: str) -> Figures:
    """Measure an upper limit of the device's rate: of a large matrix product, or of a copy within its memory."""
    if what == "copy":
        size = lab.sized(COPY_BYTES, 1 << 20) // 2
        a = torch.randint(0, 255, (size,), device=lab.device, dtype=torch.uint8)
        b = torch.empty_like(a)
        return {"gb_per_second": 2 * size / lab.seconds(lambda: b.copy_(a)) / 1e9}
    return {"tflops": lab.rate(getattr(torch, what)) / 1e12}


def branch(lab: Lab, *, shape: str, candidates: int, prefix: int) -> Figures:
    """Time one batch of candidates after one prefix, in a quarter of the layers, beside the matrix rate."""
    rate = lab.rate()  # before memory is counted
    model = drawn(lab, shape, layers_at(shape, "quarter"))
    lab.free()
    held, tokens = prefix_of(model, prefix), drawn_ids(model, candidates)
    seconds = lab.seconds(lambda: held.branch(tokens), repeats=10)
    return {
        "ms": 1e3 * seconds,
        "share_of_rate": branch_flops(model, candidates, prefix) / seconds / rate,
        "peak_over_weights": _over(lab.peak_mb(), weights_mb(model.module)),
    }


def vocabulary(lab: Lab, *, shape: str, layer: int, pass_tokens: int) -> Figures:
    """Time all tokens of a vocabulary as candidates at one position after 64 tokens, and find the right one."""
    if shape == "builtin":
        model: TruncatedModel = lab.keep("slice", (shape, layer), lambda: _builtin(lab, layer, "bfloat16"))
    else:
        model = drawn(lab, shape, layer)
    rate = lab.rate()
    lab.free()
    model.max_pass_tokens = pass_tokens
    prompt = drawn_ids(model, 65)
    held, right = prefix_of(model, 64), int(prompt[-1])
    row = model.encode(prompt)[-1:].float()
    everything, matcher = torch.arange(model.vocab_size, device=model.device), Matcher(1, False)
    nearest: list[torch.Tensor] = []

    def search() -> None:
        columns = [
            matcher.table(candidates=matcher.view(held.branch(part)), observed=row)[:, 0]
            for part in everything.split(pass_tokens)
        ]
        nearest[:] = [torch.cat(columns).argmin()]

    seconds = lab.seconds(search, repeats=1)
    return {
        "candidates": model.vocab_size,
        "seconds": seconds,
        "share_of_rate": branch_flops(model, model.vocab_size, 64) / seconds / rate,
        "right_is_nearest": int(nearest[0]) == right,
        "peak_mb": lab.peak_mb(),
        "peak_over_weights": _over(lab.peak_mb(), weights_mb(model.module)),
    }


def ways(lab: Lab, *, what: str, shape: str) -> Figures:
    """Time the same passes twice in one process: attended request by request, and as one product."""
    model = drawn(lab, shape, layers_at(shape, "quarter"))
    length = lab.sized(50, 8)
    prompts = torch.randint(
        0, model.vocab_size, (8, length + 16), generator=torch.Generator().manual_seed(SEED)
    )
    prompts = prompts.to(model.device)
    requests = [Request(model.prefix(), prompt[:length]) for prompt in prompts]
    if what == "16 candidates behind 8 prefixes":
        answers = model.run(requests)
        for request, answer in zip(requests, answers, strict=True):
            request.prefix.keep(answer, tokens=length)
        requests = [
            Request(base.prefix, row[:0], branches=row[length:])
            for base, row in zip(requests, prompts, strict=True)
        ]
    seconds = {}
    for devices in (frozenset[str](), frozenset({lab.device.type})):
        with mock.patch.object(engine, "DENSE_DEVICES", devices):
            seconds[bool(devices)] = lab.seconds(lambda: model.run(requests), repeats=10)
    return {
        "ms_each": 1e3 * seconds[False],
        "ms_together": 1e3 * seconds[True],
        "speedup": seconds[False] / seconds[True],
    }


def screen(lab: Lab, *, shape: str) -> Figures:
    """Time a batch of 512 candidates in float32, and screened: all in bfloat16, then 16 of them in float32."""
    if shape == "builtin":
        exact: TruncatedModel = lab.keep("slice", (shape, "exact"), lambda: _builtin(lab, 11, "float32"))
    else:
        layers = layers_at(shape, "quarter")
        exact = lab.keep(
            "slice",
            (shape, "exact"),
            lambda: draw_truncated(shape, layers, dtype="float32", device=str(lab.device)),
        )
    faster = Screen(exact)
    held, tokens = prefix_of(exact, lab.sized(64, 16)), drawn_ids(exact, lab.sized(512, 32))
    shadow = faster.follow(held)
    alone = lab.seconds(lambda: held.branch(tokens), repeats=10)
    screened = lab.seconds(lambda: (shadow.branch(tokens), held.branch(tokens[:16])), repeats=10)
    return {
        "ms_float32": 1e3 * alone,
        "ms_screened": 1e3 * screened,
        "speedup": alone / screened,
        "screened_by_default": Screen.pays(exact),
    }


def recovery(lab: Lab, *, shape: str, depth: str, search: str) -> Figures:
    """Time an attack on 100 tokens of raw states in bfloat16, after training the probe on the device.

    Args:
        depth: ``quarter`` or ``half`` of the model's layers.
        search: ``ours``, or ``greedy:N``: the paper's loop in the vocabulary's order with N candidates a token at most.
    """
    model = drawn(lab, shape, layers_at(shape, depth))
    tokens = drawn_ids(model, lab.sized(100, 20)).tolist()
    observation, _ = Channel.parse(()).release(model, tokens, generator(SEED, "gpu"))
    greedy = search.startswith("greedy")
    options: dict[str, Any] = {"proposal": "probe"}
    if greedy:
        options = {"search": "greedy", "proposal": "vocab", "budget": int(search.partition(":")[2])}
    attack = VocabMatch(setup="full", **options)
    start = lab.now()
    measured = attack.fit(observation.info, model, SEED).measured
    setup = lab.now() - start
    runs = []
    for _ in range(1 if greedy else 2):  # the first warms up
        start = lab.now()
        result = attack.recover(observation)
        runs.append(lab.now() - start)
    (prefill,) = time_prefill(model, [tokens])
    assert prefill is not None
    return {
        "layers": model.site.layer,
        "setup_seconds": setup,
        "probe_seconds": measured["probe_seconds"],
        "attack_seconds": runs[-1],
        "prefill_ms": 1e3 * prefill,
        "over_prefill": runs[-1] / prefill,
        "token_accuracy": sum(a == b for a, b in zip(result.ids, tokens, strict=True)) / len(tokens),
        "evaluated_per_token": result.evaluated_tokens / len(tokens),
        "calls": result.forward_calls,
        "peak_mb": lab.peak_mb(),
        "weights_mb": weights_mb(model.module),
        "paper_seconds": SHAPES[shape].paper_seconds,
    }


def layers_at(shape: str, depth: str) -> int:
    """Return the number of layers in a quarter or half of a shape."""
    return max(1, round(SHAPES[shape].layers * {"quarter": 0.25, "half": 0.5}[depth]))


def drawn(lab: Lab, shape: str, layers: int) -> TruncatedModel:
    """Draw a shape's first layers in bfloat16, or reuse those that were drawn last."""
    return lab.keep("slice", (shape, layers), lambda: draw_truncated(shape, layers, device=str(lab.device)))


def _builtin(lab: Lab, layer: int, dtype: str) -> TruncatedModel:
    assert lab.setting.model is not None
    return load_model(lab.setting.model, layer, device=str(lab.device), dtype=dtype)


def drawn_ids(model: TruncatedModel, count: int) -> torch.Tensor:
    """Draw token ids, the same for the same count."""
    source = torch.Generator().manual_seed(SEED)
    return torch.randint(0, model.vocab_size, (count,), generator=source).to(model.device)


def prefix_of(model: TruncatedModel, length: int) -> Prefix:
    """Run drawn tokens as a prefix."""
    held = model.prefix()
    held.extend(drawn_ids(model, length))
    return held


def _over(part: float | None, whole: float) -> float | None:
    return None if part is None else part / whole
