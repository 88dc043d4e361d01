"""Profile the candidate pass and whole attacks: the slowest operations, and the card's idle time."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.eval.gpu.attacks import CHANNELS, LAYER, SEED, TOKENS, model_at, released
from hiddenlab.eval.gpu.speed import drawn, drawn_ids, prefix_of
from hiddenlab.eval.gpu.work import Figures, Lab
from hiddenlab.prompts import load_prompts

SLOWEST = 10


def operations(lab: Lab, *, what: str, shape: str) -> Figures:
    """Profile one piece of work after a warm-up; times are of the device's own kernels."""
    work = {"candidates": _candidates, "attack": _attack, "real attack": _real_attack}[what](lab, shape)
    work()
    start = lab.now()
    work()
    seconds = lab.now() - start
    card = lab.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if card else [])]
    with profile(activities=activities) as seen:
        work()
        lab.wait()
    kernels = [kernel for kernel in seen.key_averages() if _own(kernel, card) > 0]
    busy = sum(_own(kernel, card) for kernel in kernels) / 1e6
    slowest = sorted(kernels, key=lambda kernel: -_own(kernel, card))[:SLOWEST]
    return {
        "seconds": seconds,
        "kernel_seconds": busy,
        "idle_share": max(0.0, 1 - busy / seconds) if card else None,
        "kernels": sum(kernel.count for kernel in kernels),
        "slowest": [
            {
                "name": kernel.key[:80],
                "ms": _own(kernel, card) / 1e3,
                "share": _own(kernel, card) / 1e6 / busy,
                "calls": kernel.count,
            }
            for kernel in slowest
        ],
    }


def _own(event: Any, card: bool) -> float:
    """Return the microseconds of an entry itself: of a kernel on the card, of an operation on a CPU."""
    if not card:
        return float(event.self_cpu_time_total)
    # An operator's entry includes the time of the kernels that it starts, so it is not counted.
    on_card = str(getattr(event, "device_type", "")).endswith("CUDA")
    return float(event.self_device_time_total) if on_card else 0.0


def _candidates(lab: Lab, shape: str) -> Callable[[], Any]:
    model = drawn(lab, shape, lab.sized(8, 2))
    held, tokens = prefix_of(model, lab.sized(128, 16)), drawn_ids(model, lab.sized(512, 16))
    return lambda: held.branch(tokens)


def _attack(lab: Lab, shape: str) -> Callable[[], Any]:
    model = drawn(lab, shape, lab.sized(8, 2))
    ((observation, _),) = released(model, (), [drawn_ids(model, lab.sized(100, 20)).tolist()])
    attack = VocabMatch(proposal="probe", setup="full")
    attack.fit(observation.info, model, SEED)
    return lambda: attack.recover(observation)


def _real_attack(lab: Lab, channel: str) -> Callable[[], Any]:
    """Prepare an attack on eight prompts of the built-in model behind a channel."""
    model = model_at(lab, LAYER)
    prompts = lab.sized(8, 1)
    tokens = [model.tokenize(prompt.text, lab.sized(TOKENS, 8)) for prompt in load_prompts(limit=prompts)]
    observations = [observation for observation, _ in released(model, CHANNELS[channel], tokens)]
    attack = VocabMatch(setup="full")
    attack.fit(observations[0].info, model, SEED)
    return lambda: attack.recover_batch(observations)
