"""Compare what the device computes with a slow reference: full forwards of the plain model on the CPU."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.defenses.cascade.load import load_cascade_model
from hiddenlab.defenses.cascade.local import LocalCascade
from hiddenlab.eval.gpu.work import Figures, Lab
from hiddenlab.matching.distance import DISTANCES, Matcher
from hiddenlab.matching.screening import Screen, near_ones
from hiddenlab.models import Request, load_model
from hiddenlab.models import engine as passes
from hiddenlab.models.load import resolve_model
from hiddenlab.proposals.in_context import Adapter
from hiddenlab.proposals.probe import probe_settings, train_probe
from hiddenlab.proposals.store import collect_states
from hiddenlab.sharding import Plan
from hiddenlab.testing import PlainModel, save_tiny

# A state may differ from the reference by this fraction of its norm (EXACT in float32). In bfloat16 the limit is twice
# the plain model's own error on this device, from ROUNDED to MOST, because sums in another order round differently.
# There the median over states counts, since a router that rounds may choose other experts.
EXACT, PLAIN, ROUNDED, MOST = 1e-4, 2.0, 0.02, 0.2
TOKENS, CANDIDATES, SEED = 24, 6, 0


def engine(lab: Lab, *, model: str, dtype: str, way: str) -> Figures:
    """Compare the engine's passes with the plain model's full forwards, as relative errors of states.

    Args:
        way: how small passes attend, ``one product`` or ``each request`` (see ``hiddenlab.models.engine``).
    """
    devices = frozenset({lab.device.type} if way == "one product" else ())
    with mock.patch.object(passes, "DENSE_DEVICES", devices):
        return _engine(lab, model, dtype)


def _engine(lab: Lab, model: str, dtype: str) -> Figures:
    path, layer = _model(lab, model)
    truncated = load_model(path, layer, dtype=dtype, device=str(lab.device))
    oracle = lab.keep("oracle", model, lambda: PlainModel(path))
    drawn = torch.Generator().manual_seed(SEED)
    high = min(truncated.vocab_size, 256 if model != "builtin" else truncated.vocab_size)
    ids = torch.randint(0, high, (TOKENS,), generator=drawn).tolist()
    others = torch.randint(0, high, (CANDIDATES,), generator=drawn).tolist()
    cut, middle = TOKENS // 2, TOKENS // 4

    def right(tokens: Sequence[int]) -> Tensor:
        return oracle.states(list(tokens), layer)

    def last(tokens: Sequence[int]) -> Tensor:
        return right(tokens)[-1]

    whole = right(ids)
    checks: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}

    def check(work: Callable[[], tuple[Tensor, Tensor]]) -> None:
        checks[work.__name__] = work

    @check
    def encode() -> tuple[Tensor, Tensor]:
        return truncated.encode(_on(lab, ids)), whole

    @check
    def branch() -> tuple[Tensor, Tensor]:
        held = truncated.prefix()
        held.extend(_on(lab, ids[:cut]))
        return held.branch(_on(lab, others)), torch.stack([last([*ids[:cut], token]) for token in others])

    @check
    def commit() -> tuple[Tensor, Tensor]:
        held = truncated.prefix()
        held.extend(_on(lab, ids[:cut]))
        held.branch(_on(lab, [*others, ids[cut]]))
        held.commit(CANDIDATES)
        return held.extend(_on(lab, ids[cut + 1 :])), whole[cut + 1 :]

    # Two prompts in one pass: a chain with alternatives beside it, and branches of two tokens behind a prefix.
    behind = truncated.prefix()
    behind.extend(_on(lab, ids[:middle]))
    pairs = [[a, b] for a, b in zip(others, reversed(others), strict=True)]
    first, second = truncated.run(
        [
            Request(
                truncated.prefix(),
                _on(lab, ids[:cut]),
                branches=_on(lab, others),
                parents=torch.arange(CANDIDATES, device=lab.device),
            ),
            Request(behind, _on(lab, []), branches=torch.tensor(pairs, device=lab.device)),
        ]
    )

    @check
    def packed_chain() -> tuple[Tensor, Tensor]:
        return first.states, whole[:cut]

    @check
    def packed_leaves() -> tuple[Tensor, Tensor]:
        return first.branches, torch.stack([last([*ids[:i], token]) for i, token in enumerate(others)])

    @check
    def packed_pairs() -> tuple[Tensor, Tensor]:
        return second.branches, torch.cat([right([*ids[:middle], *pair])[-2:] for pair in pairs])

    @check
    def keep() -> tuple[Tensor, Tensor]:
        held = truncated.prefix()
        (answer,) = truncated.run([Request(held, _on(lab, ids[:cut]), branches=_on(lab, [*others, ids[cut]]),
                                       parents=torch.full((CANDIDATES + 1,), cut, device=lab.device))])  # fmt: skip
        held.keep(answer, tokens=cut, branch=CANDIDATES)
        return held.extend(_on(lab, ids[cut + 1 :])), whole[cut + 1 :]

    @check
    def together() -> tuple[Tensor, Tensor]:
        prefixes = []
        for start in range(3):
            held = truncated.prefix()
            held.extend(_on(lab, ids[start : start + middle]))
            prefixes.append(held)
        answers = truncated.run([Request(prefix, _on(lab, others[:1])) for prefix in prefixes], together=True)
        expected = [last([*ids[i : i + middle], others[0]]) for i in range(3)]
        return torch.cat([a.states for a in answers]), torch.stack(expected)

    distances = {name: _errors(*work()) for name, work in checks.items()}
    plain = PlainModel(path, dtype=getattr(torch, dtype), device=lab.device)
    distances["plain_model"] = _errors(plain.states(ids, layer), whole)
    base = _typical(distances.pop("plain_model"), dtype)
    errors = {name: _typical(each, dtype) for name, each in distances.items()}
    return {**errors, "plain_model": base, **_verdict(list(errors.values()), base, dtype)}


def component(lab: Lab, *, what: str) -> Figures:
    """Compare one other tensor function on the device with the same on the CPU."""
    return COMPONENTS[what](lab)


def _matcher(lab: Lab) -> Figures:
    drawn = torch.Generator().manual_seed(SEED)
    candidates, rows = (torch.randn(n, 576, generator=drawn) for n in (64, 16))
    errors = []
    for name in DISTANCES:
        matcher = Matcher(int(name[-1]), name.startswith("sorted"))
        tables = [
            matcher.table(
                candidates=matcher.view(candidates.to(device)), observed=matcher.prepare(rows.to(device))
            )
            for device in (lab.device, torch.device("cpu"))
        ]
        errors.append(_errors(*tables).max())
    worst = float(torch.stack(errors).max())
    return {"error": worst, "bound": 1e-5, "equal": worst <= 1e-5}


def _screen(lab: Lab) -> Figures:
    """Check that the right token is among those of a screened batch that the truncated model itself runs."""
    path, layer = _model(lab, lab.sized("builtin", "llama"))
    model = load_model(path, layer, device=str(lab.device))
    screen, matcher = Screen(model), Matcher(1, False)
    drawn = torch.Generator().manual_seed(SEED)
    hits = 0
    for _ in range(8):
        ids = torch.randint(0, model.vocab_size, (20 + 256,), generator=drawn).to(lab.device)
        held = model.prefix()
        held.extend(ids[:19])
        row = model.encode(ids[:20])[-1:].float()
        shadow = screen.follow(held)
        batch = ids[19:]
        table = matcher.table(candidates=matcher.view(shadow.branch(batch)), observed=row)
        hits += bool((near_ones(table[:, 0]) == 0).any())
    return {"right_kept": hits, "of": 8, "equal": hits == 8}


def _probe(lab: Lab) -> Figures:
    """Check that a probe trained on the device reads as many rows right as one trained on the CPU."""
    path, layer = _model(lab, lab.sized("builtin", "llama"))
    model = load_model(path, layer, device="cpu")
    count = lab.sized(6000, 3000)
    with torch.inference_mode():
        states, tokens, _ = collect_states(model, [], count, SEED)
    settings = probe_settings(False)
    settings = type(settings)(steps=lab.sized(300, 150))
    held = len(states) // 6
    right = {}
    with torch.inference_mode(False):
        for device in (lab.device, torch.device("cpu")):
            rows, table = states.clone().to(device), model.embedding.detach().clone().to(device)
            probe = train_probe(rows[held:], tokens[held:], table, settings)
            named = probe.shortlist(rows[:held], 1)[1][:, 0].cpu()
            right[device.type] = float((named == tokens[:held]).float().mean())
    share, share_cpu = right[lab.device.type], right["cpu"]
    equal = share > 0 and abs(share - share_cpu) <= 0.02
    return {"top1": share, "top1_cpu": share_cpu, "bound": 0.02, "equal": equal}


def _adapter(lab: Lab) -> Figures:
    drawn = torch.Generator().manual_seed(SEED)
    features = torch.randn(1000, 64, generator=drawn)
    states = (features @ torch.randn(64, 96, generator=drawn)).tanh()
    tokens, distances = torch.arange(200), []
    for device in (lab.device, torch.device("cpu")):
        adapter = Adapter(features.to(device))
        squares = adapter.distances(tokens.to(device), states[:200].to(device), states[300:302].to(device))
        distances.append(squares.cpu().argsort()[:20].tolist())
    shared = len(set(distances[0]) & set(distances[1]))
    return {"nearest_shared": shared, "of": 20, "equal": shared >= 19}


def cascade(lab: Lab, *, model: str, dtype: str, alpha: int) -> Figures:
    """Compare Cascade's nodes on the device with the plain model on the CPU, as relative errors of outputs."""
    path, _ = _model(lab, model)
    kind = getattr(torch, dtype)
    sharded = LocalCascade(load_cascade_model(path, dtype=kind, device=str(lab.device)))
    oracle: Any = load_cascade_model(path, attention="eager")
    plain: Any = load_cascade_model(path, dtype=kind, device=str(lab.device), attention="eager")
    drawn = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, 256, (TOKENS,), generator=drawn)
    with torch.inference_mode():
        expected = oracle(ids[None], use_cache=False)
        plainly = plain(ids[None].to(lab.device), use_cache=False)
        output = sharded.forward(ids, Plan.clustered(TOKENS, 2, alpha=alpha))
    target, base = (_output(answer) for answer in (expected, plainly))
    error, own = _typical(_errors(output, target), dtype), _typical(_errors(base, target), dtype)
    return {"sharded": error, "plain_model": own, **_verdict([error], own, dtype)}


COMPONENTS: dict[str, Callable[[Lab], Figures]] = {
    "distances": _matcher,
    "screen": _screen,
    "probe training": _probe,
    "learning from failures": _adapter,
}


def _typical(errors: Float[Tensor, " rows"], dtype: str) -> float:
    """Return the error that counts: the largest in float32, else the median; NaN where any is NaN."""
    if bool(errors.isnan().any()):
        return math.nan
    return float(errors.max() if dtype == "float32" else errors.median())


def _verdict(errors: Sequence[float], plain: float, dtype: str) -> Figures:
    """Return the bound of errors, and whether all are within it; a NaN is not."""
    bound = EXACT if dtype == "float32" else min(max(PLAIN * plain, ROUNDED), MOST)
    return {"bound": bound, "equal": all(error <= bound for error in errors)}


def _output(answer: Any) -> Tensor:
    """Return the logits of a causal model, else the last hidden states, of the one prompt."""
    return (answer.logits if hasattr(answer, "logits") else answer.last_hidden_state)[0]


def _errors(output: Tensor, expected: Tensor) -> Float[Tensor, " rows"]:
    """Return the distance of each row to the expected one, relative to the expected row's length."""
    a, b = output.detach().cpu().double(), expected.detach().cpu().double()
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)


def _on(lab: Lab, ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=lab.device)


def _model(lab: Lab, name: str) -> tuple[str, int]:
    """Return a model's path and the layer to compare: a tiny model's last, the built-in model's eleventh."""
    if name == "builtin":
        return resolve_model(name).path, 11
    folder = lab.folder / name
    return (str(folder) if folder.is_dir() else save_tiny(name, folder)), 4
