"""Train and apply a probe that ranks the whole vocabulary for one observed state.

The probe maps a state to a whitened embedding space, scored by cosine against every token's embedding. It is trained
with sampled-softmax cross-entropy on text and random tokens that the attacker ran through the truncated model itself
(docs/internals/search.md; no paper describes it). It is linear for states whose coordinates are known, and a two-layer
network over the sorted state where they are permuted. Whitening the embedding table makes training faster
(docs/log/001-first-attack.md).

States at the first position (and at repeats of the first token) are attention sinks with a norm many times that of the
others, so rows are divided by norm into at most two groups, each with its own map.
"""

import inspect
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hiddenlab.proposals.sorted_states import Contexts
from hiddenlab.types import Progress, silent

CHUNK = 8192  # rows of the embedding table whitened at once, to hold one table in memory and not three
# Held-out rows that set the temperature, and as many of their scores as take a few seconds.
HELD_OUT, HELD_SCORES = 512, 512 * 49152
BLOCK = 64  # tokens of a vocabulary block whose best is found in one step
# Shortlists are drawn in so many directions, found on at most so many rows; so many times as many tokens as are wanted
# are then ranked in all.
SCREEN_WIDTH, SCREEN_ROWS, LOOKED_AT = 128, 4096, 2
PART = 128  # rows scored at once: their scores for all tokens are large
CLIP = 8.0  # features are clipped at this many standard deviations
SINK_RATIO = 3.0  # two groups of rows are kept apart where their median norms differ by more than this


@dataclass(frozen=True)
class ProbeSettings:
    """The training settings of a probe, part of its cache key.

    Attributes:
        sorted_states: features are the sorted coordinates (columns permuted).
        steps, batch, negatives, learning_rate: of the optimisation. hidden: units of the sorted-state network. ridge:
            of the linear map's initial fit.
        prior: share of the training text's token frequencies that is removed from the output (1: all, so that it is a
            likelihood; 0: none).
        seed: of batches and initialisation.
    """

    sorted_states: bool = False
    steps: int = 3000
    batch: int = 256
    negatives: int = 1024
    learning_rate: float = 1e-3
    hidden: int = 1536
    ridge: float = 300.0
    prior: float = 0.25
    seed: int = 0


def probe_settings(sorted_states: bool) -> ProbeSettings:
    """Return the settings that work best within the allowance (docs/log/005-better-probe.md.).

    The sorted-state network overfits sooner.
    """
    if not sorted_states:
        return ProbeSettings()
    return ProbeSettings(sorted_states=True, steps=1500, negatives=2048, prior=0.5)


def whitening(table: Float[Tensor, "v d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Return mean and whitening matrix of an embedding table (eigenvalues floored at 1e-4 of the largest)."""
    mean = table.mean(0, dtype=torch.float32)
    products = torch.zeros(len(mean), len(mean), device=mean.device)
    for rows in table.split(CHUNK):  # a centred copy of the table would take as much memory as the table
        centred = rows.float() - mean
        products.addmm_(centred.T, centred)
    values, vectors = torch.linalg.eigh(products / max(1, len(table) - 1))
    return mean, vectors * values.clamp(min=values.max() * 1e-4).rsqrt()


def whitened_table(
    table: Float[Tensor, "v d"], mean: Tensor, matrix: Tensor, padding: int = 0
) -> Float[Tensor, "w d"]:
    """Return the embeddings of all tokens in the probe's space, as rows of norm 1.

    Args:
        padding: how many rows of zeros stand at the end.
    """
    whitened = torch.empty(len(table) + padding, matrix.shape[1], device=mean.device)
    whitened[len(table) :] = 0
    for rows, place in zip(table.split(CHUNK), whitened[: len(table)].split(CHUNK), strict=True):
        torch.matmul(rows.float() - mean, matrix, out=place)
        place /= place.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return whitened


@dataclass
class Expert:
    """The map of one group of rows: standardise, normalise, then linear plus (sorted states) a hidden layer."""

    mean: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Float[Tensor, "rows d"]) -> "Expert":
        """Build an expert that standardises rows like these, without a map yet."""
        return cls(rows.mean(0), rows.std(0) + 1e-4 * rows.std() + 1e-8)

    def features(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows d"]:
        standard = ((rows - self.mean) / self.scale).clamp(-CLIP, CLIP)
        return F.normalize(standard, dim=1) * math.sqrt(rows.shape[1])

    def direction(self, features: Float[Tensor, "rows d"]) -> Float[Tensor, "rows e"]:
        """Return unit vectors in the whitened embedding space."""
        p = self.parameters
        directions = features @ p["linear"] + p["bias"]
        if "hidden_in" in p:
            directions = directions + F.gelu(features @ p["hidden_in"] + p["hidden_bias"]) @ p["hidden_out"]
        return F.normalize(directions, dim=1)


class Probe:
    """Scores of every token for observed rows.

    Attributes:
        experts: one map, or two where rows fall into two groups by norm. border: log norm between the groups.
        screen: directions in which shortlists are drawn, as columns; None draws them in all.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        experts: Sequence[Expert],
        border: float,
        mean: Tensor,
        matrix: Tensor,
        screen: Tensor | None = None,
    ) -> None:
        self.settings = settings
        self.experts = list(experts)
        self.border = border
        self.mean, self.matrix, self.screen = mean, matrix, screen
        self._table: Tensor | None = None
        self._contexts: Contexts | None = None

    def beside(self, contexts: Contexts) -> "Probe":
        """Also score with mean sorted states behind texts; return the probe."""
        self._contexts = contexts
        return self

    def screened_by(self, rows: Float[Tensor, "rows d"]) -> "Probe":
        """Find the directions that predictions for rows like these mostly lie in; return the probe.

        Shortlists are drawn in these directions alone, and then ranked in all: scoring the vocabulary costs a fraction
        (docs/log/041-layers-and-screens.md).
        """
        self.screen = None
        if len(self.matrix) > SCREEN_WIDTH:
            directions = F.normalize(self.direction(rows[:: -(-len(rows) // SCREEN_ROWS)]), dim=1)
            _, principal = torch.linalg.eigh(directions.T @ directions)
            self.screen = principal[:, -SCREEN_WIDTH:].contiguous()
        return self

    def with_table(self, table: Float[Tensor, "v d"]) -> "Probe":
        """Give the probe the model's embedding table to score against; return the probe."""
        # Whole blocks, so that the best of each block is found in one vectorised pass.
        padding = -len(table) % BLOCK
        padded = whitened_table(table.to(self.mean.device), self.mean, self.matrix, padding)
        self._table = padded[: len(table)]
        narrow = padded if self.screen is None else padded @ self.screen
        self._fast = narrow.to(fast_dtype(narrow.device))  # the same table in memory where it has this dtype
        return self

    @property
    def table(self) -> Float[Tensor, "v e"]:
        """The embeddings of all tokens in the probe's space, as rows of norm 1."""
        assert self._table is not None
        return self._table

    def group(self, rows: Float[Tensor, "rows d"]) -> Bool[Tensor, " rows"]:
        """Return True for the rows of the second (large-norm) group."""
        return rows.float().norm(dim=1).log() > self.border

    def direction(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows e"]:
        """Return each row's direction in the whitened embedding space, scaled by the learned inverse temperature."""
        rows = self._prepare(rows)
        # Every map reads every row: splitting the rows would make a GPU wait longer than the extra work takes.
        scaled = [
            expert.direction(expert.features(rows)) * expert.parameters["log_scale"].exp()
            for expert in self.experts
        ]
        return scaled[0] if len(scaled) == 1 else torch.where(self.group(rows)[:, None], scaled[1], scaled[0])

    def _prepare(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.mean.device).float()
        return rows.sort(dim=1).values if self.settings.sorted_states else rows

    def log_probs(self, rows: Float[Tensor, "rows d"]) -> Float[Tensor, "rows v"]:
        """Return log-probabilities over the vocabulary, in float32."""
        own = (self.direction(rows) @ self.table.T).log_softmax(-1)
        return own if self._contexts is None else self._contexts.with_probe(rows, own)

    def shortlist(
        self, rows: Float[Tensor, "rows d"], k: int
    ) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
        """Return the k best tokens of each row and their log-probabilities among themselves.

        Scores are computed in the fastest dtype available: the best blocks of the vocabulary are chosen by their
        maximum, and only tokens within them are ranked. Where mean states behind texts count too, all tokens are
        scored.
        """
        assert self._table is not None
        vocab = len(self._table)
        k = min(k, vocab)
        values, ids = [], []
        if self._contexts is not None:
            of_parts = [self.log_probs(part).topk(k, dim=1) for part in rows.split(PART)]
            return torch.cat([candidates.values.log_softmax(1) for candidates in of_parts]), torch.cat(
                [candidates.indices for candidates in of_parts]
            )
        looked_at = k if self.screen is None else min(LOOKED_AT * k, vocab)
        # Memory that is used again: making room for so many scores takes longer than computing them.
        room = torch.empty(
            min(PART, len(rows)), len(self._fast), dtype=self._fast.dtype, device=self.mean.device
        )
        for directions in self.direction(rows).split(PART):
            narrow = directions if self.screen is None else directions @ self.screen
            scores = torch.mm(narrow.to(self._fast.dtype), self._fast.T, out=room[: len(narrow)])
            scores = scores.view(len(narrow), -1, BLOCK)
            best = scores.amax(2).topk(min(looked_at, scores.shape[1]), dim=1).indices
            inside = torch.take_along_dim(scores, best[:, :, None], 1).flatten(1).float()
            tokens = (best[:, :, None] * BLOCK + torch.arange(BLOCK, device=best.device)).flatten(1)
            inside = inside.masked_fill(tokens >= vocab, float("-inf"))
            top = inside.topk(min(looked_at, inside.shape[1]), dim=1)
            chosen, logits = tokens.gather(1, top.indices), top.values
            if self.screen is not None:
                rows_of = self._table.index_select(0, chosen.clamp(max=vocab - 1).flatten())
                exact = torch.einsum("rd,rkd->rk", directions, rows_of.view(*chosen.shape, -1))
                exact = exact.masked_fill(chosen >= vocab, float("-inf"))
                logits, place = exact.topk(k, dim=1)
                chosen = chosen.gather(1, place)
            values.append(logits.log_softmax(1))
            ids.append(chosen)
        return torch.cat(values), torch.cat(ids)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything to save, by name."""
        tensors = {"border": torch.tensor(self.border), "mean": self.mean, "matrix": self.matrix}
        tensors |= {} if self.screen is None else {"screen": self.screen}
        for i, expert in enumerate(self.experts):
            named = {"mean": expert.mean, "scale": expert.scale, **expert.parameters}
            tensors |= {f"expert.{i}.{name}": value.contiguous() for name, value in named.items()}
        return tensors

    @classmethod
    def from_tensors(cls, settings: ProbeSettings, tensors: dict[str, Tensor]) -> "Probe":
        """Rebuild from ``tensors``."""
        experts: list[Expert] = []
        while any(name.startswith(f"expert.{len(experts)}.") for name in tensors):
            start = f"expert.{len(experts)}."
            own = {
                name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
            }
            experts.append(Expert(own.pop("mean"), own.pop("scale"), own))
        of_all = tensors["mean"], tensors["matrix"], tensors.get("screen")
        return cls(settings, experts, float(tensors["border"]), *of_all)


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the processor multiplies it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.bfloat16 if supported() else torch.float32


def norm_border(norms: Float[Tensor, " rows"], enough: int = 64) -> float:
    """Return the log norm that splits rows into two groups far apart, or infinity where there is one group.

    One-dimensional two-means on log norms, started at the extremes.

    Args:
        enough: rows that a group must have.
    """
    norms = norms.clamp(min=1e-30).log()
    low, high = norms.min(), norms.max()
    for _ in range(20):
        upper = norms > (low + high) / 2
        if not bool(upper.any()) or bool(upper.all()):
            return math.inf
        low, high = norms[~upper].median(), norms[upper].median()
    two = min(int(upper.sum()), int((~upper).sum())) >= enough and float(high - low) > math.log(SINK_RATIO)
    return float((low + high) / 2) if two else math.inf


def train_probe(
    states: Float[Tensor, "rows d"],
    tokens: Int[Tensor, " rows"],
    table: Float[Tensor, "v e"],
    settings: ProbeSettings,
    progress: Progress = silent,
) -> Probe:
    """Train a probe on the attacker's own states.

    Args:
        states: one row for each training position, unsorted. tokens: the token of each row. table: input embeddings.
    """
    return Training(states, tokens, table, settings).finished(progress)


class Training:
    """The training of a probe, which may be stopped between two steps and gone on with.

    Args:
        states, tokens, table, settings: as for ``train_probe``.
    """

    def __init__(
        self,
        states: Float[Tensor, "rows d"],
        tokens: Int[Tensor, " rows"],
        table: Float[Tensor, "v e"],
        settings: ProbeSettings,
    ) -> None:
        self._steps = _training(states, tokens, table, settings)

    @property
    def can_go_on(self) -> bool:
        """Whether ``finished`` may be called: the training was neither ended nor broken by an error of its own."""
        return inspect.getgeneratorstate(self._steps) != inspect.GEN_CLOSED

    def finished(self, progress: Progress = silent) -> Probe:
        """Train to the end and return the probe; what ``progress`` raises stops the training where it is."""
        while True:
            try:
                done, total = next(self._steps)
            except StopIteration as end:
                probe: Probe = end.value
                return probe
            progress("training the probe", done, total)


def _training(
    states: Float[Tensor, "rows d"],
    tokens: Int[Tensor, " rows"],
    table: Float[Tensor, "v e"],
    settings: ProbeSettings,
) -> Generator[tuple[int, int], None, Probe]:
    """Train step by step; yield how many steps are done, and of how many."""
    device = states.device
    generator = torch.Generator().manual_seed(settings.seed)
    mean, matrix = (x.to(device) for x in whitening(table.to(device)))
    targets = whitened_table(table.to(device), mean, matrix)
    rows = states.float()
    if settings.sorted_states:
        rows = rows.sort(dim=1).values
    labels = tokens.cpu()
    border = norm_border(rows.norm(dim=1))
    sink = rows.norm(dim=1).log() > border
    masks = [~sink] if not bool(sink.any()) else [~sink, sink]
    experts = []
    total = settings.steps * len(masks)
    for i, mask in enumerate(masks):
        # The sink group is small and simple: fewer steps are enough.
        steps = settings.steps if i == 0 else settings.steps // 2
        # Indices, not copies: the rows are the largest tensor of the training.
        index = mask.nonzero()[:, 0].cpu()
        index = index[torch.randperm(len(index), generator=generator)]
        cut = min(HELD_OUT, len(index) // 10)
        held, kept = index[:cut], index[cut:]
        own = labels[kept].to(device)
        prior = token_prior(own, len(targets), settings)
        done = (i * settings.steps, total)
        expert = yield from _expert_training(
            rows[kept.to(device)], own, targets, prior, settings, steps, generator, done
        )
        if len(held):
            _calibrate(expert, rows[held.to(device)], labels[held].to(device), targets, prior)
        experts.append(expert)
    yield total, total
    return Probe(settings, experts, border, mean, matrix).screened_by(rows).with_table(table)


def token_prior(tokens: Tensor, vocab: int, settings: ProbeSettings) -> Tensor:
    """Return logits that training adds and the probe leaves out (logit adjustment, Menon et al. 2021)."""
    counts = torch.bincount(tokens, minlength=vocab).float() + 1
    return settings.prior * (counts / counts.sum()).log()


def _calibrate(expert: Expert, rows: Tensor, tokens: Tensor, targets: Tensor, prior: Tensor) -> None:
    """Set the temperature on held-out rows, since training on a sample of the vocabulary makes scores too uncertain."""
    few = max(1, HELD_SCORES // len(targets))
    rows, tokens = rows[:few], tokens[:few]
    cosines = expert.direction(expert.features(rows)) @ targets.T
    scales = expert.parameters["log_scale"].exp() * torch.linspace(0.5, 4.0, 29, device=rows.device)
    losses = torch.stack([F.cross_entropy(cosines * scale + prior, tokens) for scale in scales])
    expert.parameters["log_scale"] = scales[losses.argmin()].log()


def sampled_softmax(
    expert: Expert,
    features: Float[Tensor, "rows d"],
    place: Int[Tensor, " rows"],
    targets: Float[Tensor, "classes e"],
    prior: Float[Tensor, " classes"],
) -> Float[Tensor, ""]:
    """Return the cross-entropy of each row's token among a sample of the vocabulary, in the dtype of its embeddings.

    Args:
        place: index of each row's token in the sample. targets, prior: of the tokens in the sample.
    """
    unit = expert.direction(features).to(targets.dtype)
    logits = (unit @ targets.T).float() * expert.parameters["log_scale"].exp()
    return F.cross_entropy(logits + prior, place)


def ridge_expert(
    rows: Float[Tensor, "rows d"], targets: Float[Tensor, "rows e"], ridge: float = 300.0
) -> Expert:
    """Return an expert whose linear map is the ridge regression from rows to their tokens' whitened embeddings."""
    expert = Expert.of(rows)
    features = expert.features(rows)
    gram = features.T @ features + ridge * torch.eye(rows.shape[1], device=rows.device)
    expert.parameters = {
        "linear": torch.linalg.solve(gram, features.T @ targets),
        "bias": torch.zeros(targets.shape[1], device=rows.device),
        "log_scale": torch.tensor(3.0, device=rows.device),
    }
    return expert


def _expert_training(
    rows: Tensor, tokens: Tensor, targets: Tensor, prior: Tensor, settings: ProbeSettings, steps: int,
    generator: torch.Generator, done: tuple[int, int],
) -> Generator[tuple[int, int], None, Expert]:  # fmt: skip
    """Train the expert of one group; ``done`` is how many steps were done before, and of how many in all."""
    device, d, width = rows.device, rows.shape[1], targets.shape[1]
    # Half precision is enough for logits, and their product is most of the work.
    fast = targets.to(fast_dtype(device))
    expert = ridge_expert(rows, targets[tokens], settings.ridge)
    features = expert.features(rows)
    p = expert.parameters
    if settings.sorted_states:
        p["hidden_in"] = (torch.randn(d, settings.hidden, generator=generator) / math.sqrt(d)).to(device)
        p["hidden_bias"] = torch.zeros(settings.hidden, device=device)
        p["hidden_out"] = torch.zeros(settings.hidden, width, device=device)
    expert.parameters = {name: value.requires_grad_() for name, value in p.items()}
    optimizer = torch.optim.AdamW(p.values(), lr=settings.learning_rate, weight_decay=0.01)
    vocab = len(targets)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        pick = torch.randint(0, len(tokens), (settings.batch,), generator=generator).to(device)
        negatives = torch.randint(0, vocab, (min(settings.negatives, vocab),), generator=generator).to(device)
        classes, place = torch.cat([tokens[pick], negatives]).unique(return_inverse=True)
        with torch.enable_grad():  # not across a yield: it would hold for whoever runs meanwhile
            loss = sampled_softmax(expert, features[pick], place[: len(pick)], fast[classes], prior[classes])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if step % 20 == 0:
            yield done[0] + step, done[1]
    expert.parameters = {name: value.detach() for name, value in p.items()}
    return expert
