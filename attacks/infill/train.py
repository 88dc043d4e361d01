"""Train an infiller on the attacker's own texts, masked like the plan, until a held-out loss stops improving."""

import json
import math
import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from hiddenlab.attacks.infill.masks import Shards
from hiddenlab.attacks.infill.model import Infiller
from hiddenlab.attacks.infill.text import hash_seed, windows
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError
from hiddenlab.models import TruncatedModel
from hiddenlab.models.load import resolve_model
from hiddenlab.proposals.probe import fast_dtype
from hiddenlab.proposals.store import identity_of, probe_for
from hiddenlab.types import ObservationInfo, Progress
from hiddenlab.utils.cache import cache_path
from hiddenlab.utils.digests import digest_of
from hiddenlab.utils.files import save_tensors
from hiddenlab.utils.locks import one_at_a_time

FORMAT = 2
HELD_OUT = 32  # windows of the held-out set, each with one mask
DAMAGED = OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError  # damaged files
WAITING = "waiting for another process that trains this infiller"
MIN_GAIN = 1e-3  # of the held-out loss, for an evaluation to count as better


@dataclass(frozen=True)
class Recipe:
    """The training settings of an infiller, part of its cache key.

    Attributes:
        text: ``own`` or a source of prompts. windows, length: training texts and their tokens. steps: at most.
        batch, rank, learning_rate, warmup: of the optimisation. every: steps between evaluations. patience: evaluations
            without gain after which training ends.
    """

    text: str = "own"
    windows: int = 1024
    length: int = 96
    steps: int = 800
    batch: int = 8
    rank: int = 16
    learning_rate: float = 5e-4
    warmup: int = 20
    every: int = 50
    patience: int = 3
    seed: int = 0


PRESETS = {
    "small": Recipe(),
    "medium": Recipe(windows=16384, steps=4000, batch=16, every=100),
    "paper": Recipe(
        text="hf:HuggingFaceFW/fineweb-edu:sample-10BT:train:text", windows=500_000, length=256, steps=50_000, batch=32,
        rank=64, learning_rate=2e-4, warmup=500, every=500,
    ),
}  # fmt: skip


@dataclass
class State:
    """The progress of a training."""

    step: int = 0
    best: float = math.inf
    bad: int = 0
    seconds: float = 0.0
    done: bool = False
    history: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Texts, and which of their tokens and states are known."""

    tokens: Int[Tensor, "b n"]
    known: Bool[Tensor, "b n"]
    states: Float[Tensor, "b n d"] | None

    @property
    def wanted(self) -> Bool[Tensor, "b n"]:
        """The positions to predict: those not held, or all of them where every row is shown."""
        return torch.ones_like(self.known) if bool(self.known.all()) else ~self.known


class Data:
    """Batches for every step, the same for each seed, so that a resumed training continues unchanged."""

    def __init__(
        self, model: TruncatedModel, info: ObservationInfo, shards: Shards, recipe: Recipe, progress: Progress
    ) -> None:
        self.model, self.shards, self.recipe = model, shards, recipe
        self.channel = Channel.parse(info.channel)
        self.texts = windows(
            model, recipe.text, recipe.windows + HELD_OUT, recipe.length, recipe.seed, progress
        )
        if len(self.texts) < HELD_OUT + recipe.batch:
            raise InputError(
                f"{recipe.text} gives {len(self.texts)} windows of {recipe.length} tokens; at least "
                f"{HELD_OUT + recipe.batch} are needed"
            )
        self.reads_states = model.site.stream != "embed"
        self.probe = probe_for(model, info, progress)[0] if self.reads_states else None

    def held_out(self) -> list[Batch]:
        """Return the batches of the held-out windows."""
        size = self.recipe.batch
        return [
            self._batch(list(range(i, min(i + size, HELD_OUT))), -1 - i) for i in range(0, HELD_OUT, size)
        ]

    def at(self, step: int) -> Batch:
        """Return the batch of a step."""
        draw = random.Random(hash_seed(self.recipe.seed, step))
        return self._batch(
            [draw.randrange(HELD_OUT, len(self.texts)) for _ in range(self.recipe.batch)], step
        )

    def _batch(self, rows: list[int], step: int) -> Batch:
        draw = random.Random(hash_seed(self.recipe.seed, step, 1))
        truth = self.texts[rows].to(self.model.device)
        known = torch.zeros_like(truth, dtype=torch.bool)
        for row in known:
            row[self.shards.draw(len(row), draw)] = True
        if not self.reads_states:
            return Batch(truth, known, None)
        generator = torch.Generator().manual_seed(hash_seed(self.recipe.seed, step, 2))
        released = self.channel.release_batch(self.model, truth.tolist(), generator)
        states = torch.stack([observation.states.float() for observation, _ in released])
        return Batch(truth, known, states)

    def inputs(self, batch: Batch) -> Int[Tensor, "b n"]:
        """Return the tokens that the attacker reads at the known positions."""
        if batch.states is None:
            return batch.tokens
        return read_tokens(self.probe, batch.states)


def read_tokens(probe: Any, states: Float[Tensor, "b n d"]) -> Int[Tensor, "b n"]:
    """Return the probe's best guess for each state."""
    return probe.shortlist(states.flatten(0, 1), 1)[1][:, 0].view(states.shape[:2])  # type: ignore[no-any-return]


def train_infiller(
    model: TruncatedModel,
    info: ObservationInfo,
    shards: Shards,
    recipe: Recipe,
    progress: Progress,
    masked: str | None = None,
) -> tuple[Infiller, State]:
    """Train an infiller for a site and a family of views, or load it from the cache; resume what was interrupted.

    An infiller that reads states starts from the infiller of tokens alone, which is trained first: states tell little
    beyond their own tokens, which could not be learned together with the language. Of two processes that need the same
    infiller the second waits for the first.

    Args:
        info: the channel, as if every row had been shown. masked: a masked language model to tune, otherwise the
            attacked model is tuned.

    Raises:
        InputError: the texts cannot be had, there is no such masked language model, or the checkpoint is another's.
    """
    identity = _identity(model, info, shards, recipe, masked)
    # Processes that accelerate started together train one infiller together.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or _checkpoint_exists(identity, done=True):
        return _trained(identity, model, info, shards, recipe, progress, masked)
    with one_at_a_time(checkpoint_path(identity), WAITING, progress):
        return _trained(identity, model, info, shards, recipe, progress, masked)


def _trained(
    identity: dict[str, Any], model: TruncatedModel, info: ObservationInfo, shards: Shards, recipe: Recipe,
    progress: Progress, masked: str | None,
) -> tuple[Infiller, State]:  # fmt: skip
    start: dict[str, Tensor] = {}
    before = 0.0
    if model.site.stream != "embed" and not shards.whole and not _checkpoint_exists(identity):
        # Runs before this infiller's weights are loaded, so that only one is in memory at a time.
        start, before = _from_tokens(model, info, shards, recipe, progress, masked)
    torch.manual_seed(recipe.seed)  # of LoRA's first weights
    infiller = Infiller(model, recipe.rank, fast_dtype(model.device), masked)
    infiller.restore(infiller.trained() | start)
    state, moments = _load(identity, infiller)
    if state.done:
        return infiller, state
    state.seconds += before
    data = Data(model, info, shards, recipe, progress)
    _run(infiller, data, recipe, state, moments, identity, progress)
    _restore_best(identity, infiller)
    return infiller, state


def _from_tokens(
    model: TruncatedModel,
    info: ObservationInfo,
    shards: Shards,
    recipe: Recipe,
    progress: Progress,
    masked: str | None,
) -> tuple[dict[str, Tensor], float]:
    """Return the trained tensors of the infiller that reads tokens in place of states, and its seconds of training."""
    plain = model.sibling(0, stream="embed", dtype=str(model.dtype).removeprefix("torch."))
    info = replace(info, site=plain.site, channel=())
    infiller, state = train_infiller(plain, info, shards, recipe, progress, masked)
    return infiller.trained(), state.seconds


def _run(
    infiller: Infiller, data: Data, recipe: Recipe, state: State, moments: dict[str, Tensor],
    identity: dict[str, Any], progress: Progress,
) -> None:  # fmt: skip
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=data.model.device.type == "cpu")
    parameters = {name: p for name, p in infiller.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=recipe.learning_rate, weight_decay=0.0)
    for name, p in parameters.items():
        if f"m.{name}" in moments:
            optimizer.state[p] = {
                "step": torch.tensor(float(state.step)), "exp_avg": moments[f"m.{name}"],
                "exp_avg_sq": moments[f"v.{name}"],
            }  # fmt: skip
    model, optimizer = accelerator.prepare(infiller, optimizer)
    held_out = data.held_out()
    if infiller.reads_states and state.step == 0:
        infiller.standardise(torch.cat([b.states.flatten(0, 1) for b in held_out if b.states is not None]))
    started, before = time.perf_counter(), state.seconds

    def measured() -> float:
        with torch.no_grad():
            return sum(float(loss_of(model, data, b)) for b in held_out) / len(held_out)

    if not recipe.steps:
        state.best = measured()
    with torch.inference_mode(False), torch.enable_grad():
        while state.step < recipe.steps and state.bad < recipe.patience:
            warm = min(1.0, (state.step + 1) / recipe.warmup)
            rate = recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * state.step / recipe.steps))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(
                model, data, data.at(state.step * accelerator.num_processes + accelerator.process_index)
            )
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.seconds = before + time.perf_counter() - started
            shown = f"training the infiller\tloss {float(loss.detach()):.2f}, held out {state.best:.2f}"
            progress(shown, state.step, recipe.steps)
            if state.step % recipe.every == 0 or state.step == recipe.steps:
                now = measured()
                state.history.append((state.step, now))
                better = now < state.best - MIN_GAIN
                state.best, state.bad = (now, 0) if better else (state.best, state.bad + 1)
                if accelerator.is_main_process:
                    _save(identity, infiller, optimizer, parameters, state, better)
    state.done = True
    progress("training the infiller", recipe.steps, recipe.steps)
    if accelerator.is_main_process:
        _save(identity, infiller, optimizer, parameters, state, not recipe.steps)
    accelerator.wait_for_everyone()  # before the best checkpoint is read


def loss_of(model: Any, data: Data, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the wanted tokens, in nats."""
    states = (
        None if batch.states is None else batch.states.clone()
    )  # inference tensors take no part in autograd
    wanted = batch.wanted
    logits = model(data.inputs(batch).clone(), batch.known, states, wanted)
    return F.cross_entropy(logits, batch.tokens[wanted])


def _identity(
    model: TruncatedModel, info: ObservationInfo, shards: Shards, recipe: Recipe, masked: str | None = None
) -> dict[str, Any]:
    other = {} if masked is None else {"masked": resolve_model(masked).path}
    return {
        **identity_of(model, list(info.channel)),
        "format": FORMAT,
        "shards": asdict(shards),
        "recipe": asdict(recipe),
        **other,
    }


def checkpoint_path(identity: dict[str, Any]) -> Path:
    """Return where a training's newest state is kept; the best is beside it."""
    return cache_path("infill", f"{digest_of(identity)}.safetensors")


def _best(path: Path) -> Path:
    return path.with_suffix(".best.safetensors")


def _save(
    identity: dict[str, Any],
    infiller: Infiller,
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    state: State,
    best: bool,
) -> None:
    path = checkpoint_path(identity)
    weights = {f"p.{name}": value.detach().cpu() for name, value in infiller.trained().items()}
    moments: dict[str, Tensor] = {}
    inner = getattr(optimizer, "optimizer", optimizer)
    for name, p in parameters.items():
        own = inner.state.get(p)
        if own:
            moments |= {f"m.{name}": own["exp_avg"].cpu(), f"v.{name}": own["exp_avg_sq"].cpu()}
    about = {"hiddenlab": json.dumps({"identity": identity, "state": asdict(state)})}
    # The best one is written first: the newest state refers to it.
    files = ([(_best(path), weights)] if best else []) + [(path, weights | moments)]
    for target, tensors in files:
        save_tensors(target, {name: value.contiguous() for name, value in tensors.items()}, about)


def _checkpoint_exists(identity: dict[str, Any], done: bool = False) -> bool:
    """Return whether a readable checkpoint exists, or with ``done`` one of a finished training."""
    path = checkpoint_path(identity)
    with suppress(*DAMAGED), safe_open(path, "pt") as file:
        about = _described(file, identity, path)
        return not done or bool(about["state"]["done"])
    return False


def _described(file: Any, identity: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint's description of itself.

    Raises:
        InputError: it is of another model, site, channel, plan or recipe.
    """
    about: dict[str, Any] = json.loads((file.metadata() or {})["hiddenlab"])
    wanted, stored = json.loads(json.dumps(identity)), about["identity"]
    names = [name for name in wanted | stored if wanted.get(name) != stored.get(name)]
    if names:
        differences = "; ".join(f"{name} {stored.get(name)}, not {wanted.get(name)}" for name in names)
        raise InputError(
            f"the checkpoint {path} is of another training: {differences}; move it away to train anew"
        )
    return about


def _load(identity: dict[str, Any], infiller: Infiller) -> tuple[State, dict[str, Tensor]]:
    """Return the state of a training and its optimiser's moments; a new state where no checkpoint is readable."""
    path = checkpoint_path(identity)
    with suppress(*DAMAGED), safe_open(path, "pt") as file:
        about = _described(file, identity, path)
        history = [(int(step), float(loss)) for step, loss in about["state"]["history"]]
        state = State(**{**about["state"], "history": history})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        infiller.restore({name[2:]: value for name, value in tensors.items() if name.startswith("p.")})
        device = infiller.mask.device
        if state.done:
            _restore_best(identity, infiller)
        return state, {n: v.to(device) for n, v in tensors.items() if n[:2] in ("m.", "v.")}
    return State(), {}


def _restore_best(identity: dict[str, Any], infiller: Infiller) -> None:
    with safe_open(_best(checkpoint_path(identity)), "pt") as file:
        infiller.restore({name[2:]: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
