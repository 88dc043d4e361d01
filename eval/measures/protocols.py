"""Measure private-inference schemes: their error and cost, and how much of a prompt they reveal."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hiddenlab.attacks.closed_weights.model import with_table
from hiddenlab.attacks.closed_weights.prior import refine
from hiddenlab.attacks.closed_weights.public_embedding import ClosedWeights
from hiddenlab.attacks.closed_weights.recover import collect_untied, rebuild_tied
from hiddenlab.attacks.closed_weights.substitution import solve
from hiddenlab.attacks.closed_weights.view import ServerView, rows_of
from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.channels import Channel
from hiddenlab.defenses.protocols.checkpoint import load_weights, write_checkpoint
from hiddenlab.defenses.protocols.decoder import Weights
from hiddenlab.defenses.protocols.forward import Plain, walk
from hiddenlab.defenses.protocols.shares import HELPER, Centaur, PermLLM
from hiddenlab.defenses.protocols.stip import SERVER, Keys, Stip
from hiddenlab.errors import InputError
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import as_figures, exactly
from hiddenlab.eval.measures.intervals import mean, ratio, share
from hiddenlab.eval.measures.metrics import score_text
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.models.device import parse_device
from hiddenlab.models.load import load_config, load_module, resolve_model
from hiddenlab.models.tokens import token_ids
from hiddenlab.prompts import load_prompts
from hiddenlab.proposals.corpus import standard_library_sources
from hiddenlab.proposals.probe import fast_dtype
from hiddenlab.types import AttackResult, Observation, ObservationInfo, Progress, silent
from hiddenlab.utils.random import generator

PLAIN = "plain"
NOISE_PROMPTS, NOISE_ROOM = (
    4,
    4.0,
)  # the attacker's prompts that measure a scheme's rounding, and a safety factor on it


@dataclass(frozen=True)
class _Revealing:
    """A scheme whose non-linear parts show permuted states: to which party, and what is permuted."""

    make: Any
    party: str
    channel: str


REVEALING = {
    "centaur": _Revealing(Centaur, SERVER, "hidden-perm:shared"),
    "permllm": _Revealing(PermLLM, HELPER, "2d-perm"),
}
CLOSED = ("stip", "centaur")  # schemes whose server has a permuted model and users' vectors in the same order
SCHEMES: dict[str, Any] = {"stip": Stip, **{name: entry.make for name, entry in REVEALING.items()}}


def scheme(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Compare a scheme's logits and cost with the plain model's, run step by step by the same code.

    Args:
        spec: model, prompts, limit, max_tokens, seed, scheme, generate (new tokens to compare, STIP only); dtype, in
            which both compute (default float32). The plain model is compared with itself in float64.
    """
    weights, prompts = model_and_prompts(spec)
    weights = weights.to(getattr(torch, spec.get("dtype", "float32")))
    wide = weights.to(torch.float64) if spec["scheme"] == PLAIN else weights
    own = None if spec["scheme"] == PLAIN else SCHEMES[spec["scheme"]](weights, seed=spec["seed"])
    rows: list[tuple[float, ...]] = []
    generated: list[bool] = []
    costs: dict[str, list[float]] = {"megabytes": [], "rounds": [], "dealt_megabytes": []}
    with torch.inference_mode():
        walk(weights, weights.inputs(prompts[0]), Plain())  # the first pass is slower than all others
        for i, tokens in enumerate(prompts):
            started = time.perf_counter()
            plain = walk(weights, weights.inputs(tokens), Plain())[0]
            between = time.perf_counter()
            before_bytes = _costs(own)
            logits = walk(wide, wide.inputs(tokens), Plain())[0] if own is None else own.logits(tokens)
            ended = time.perf_counter()
            for name, was, now in zip(costs, before_bytes, _costs(own), strict=True):
                costs[name].append(now - was)
            agree = float((plain.argmax(1) == logits.argmax(1)).sum())
            rows.append(
                (float((logits - plain).abs().max()), agree, len(tokens), ended - between, between - started)
            )
            if spec["generate"] and isinstance(own, Stip):
                generated.append(
                    own.generate(tokens, spec["generate"]) == _greedy(weights, tokens, spec["generate"])
                )
            progress("prompts", i + 1, len(prompts))
    errors, agreed, counts, seconds, before = (
        [float(x) for x in column] for column in zip(*rows, strict=True)
    )
    estimates = {
        "logit_error": mean(errors),
        "top1_agreement": ratio(agreed, counts),
        "seconds_per_prompt": mean(before if own is None else seconds),
    }
    if own is not None:
        estimates["over_plain"] = ratio(seconds, before)
    if generated:
        estimates["same_generated"] = share(generated)
    if generated:
        return as_figures({"same_generated": estimates["same_generated"]})
    figures = as_figures(estimates) | {"largest_logit_error": exactly(max(errors), len(errors))}
    if own is not None:
        return figures | as_figures({name: mean(values) for name, values in costs.items()})
    return figures | {
        "transformers_error": exactly(_off_transformers(spec["model"], weights, prompts), len(prompts))
    }


@torch.inference_mode()
def _off_transformers(name: str, weights: Weights, prompts: Sequence[Sequence[int]]) -> float:
    """Return the largest difference of a logit between the step-by-step code and transformers' own model."""
    ref = resolve_model(name)
    model: Any = load_module(
        ref, load_config(ref), head=True, dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )
    worst = 0.0
    for tokens in prompts:
        own = walk(weights, weights.inputs(tokens), Plain())[0]
        worst = max(worst, float((model(torch.tensor([tokens])).logits[0] - own).abs().max()))
    return worst


def _costs(own: Any) -> tuple[float, float, float]:
    """Return megabytes sent, rounds and megabytes dealt so far, and clear what the parties learnt."""
    if own is None:
        return 0.0, 0.0, 0.0
    transcript = own.transcript
    transcript.learnt.clear()
    return transcript.bytes / 1e6, float(transcript.rounds), transcript.dealt / 1e6


def closed_weights(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Attack a scheme's users as its server, given only its own view as a file.

    Args:
        spec: model, prompts, limit, max_tokens, seed; scheme: ``stip`` (default) or ``centaur``; embedding: ``public``
            (the attacker has the token embedding), ``base`` (it has that of a public model, from which the private one
            was tuned: every value moved by ``drift`` standard deviations) or ``tied`` (it has no embedding; symbols are
            recovered, one for each token).
    """
    weights, prompts = model_and_prompts(spec)
    assert weights.embedding is not None
    public = load_model(spec["model"], 0, stream="embed", device="cpu")
    if spec["embedding"] == "base":
        own = weights.embedding
        noise = torch.randn(own.shape, generator=generator(spec["seed"], "drift"))
        weights = replace(weights, embedding=own + spec["drift"] * float(own.std()) * noise)
    view, keys = _closed(spec.get("scheme", "stip"), weights, prompts, spec["seed"])
    view = ServerView.load(view.save(folder).parent)
    started = time.perf_counter()
    if spec["embedding"] == "tied":
        rebuilt = rebuild_tied(view)
        guesses = [list(symbols) for symbols in rebuilt.symbols]
        names = {int(row): symbol for symbol, row in enumerate(keys.vocabulary.tolist())}
        truth = [[names[token] for token in tokens] for tokens in prompts]
    else:
        guesses, truth = read_view(view, public), prompts
    seconds = (time.perf_counter() - started) / len(prompts)
    accuracy = [
        sum(a == b for a, b in zip(x, y, strict=True)) / len(y) for x, y in zip(guesses, truth, strict=True)
    ]
    return as_figures(
        {
            "exact": share([x == y for x, y in zip(guesses, truth, strict=True)]),
            "token_accuracy": mean(accuracy),
        }
    ) | {"seconds_per_prompt": exactly(seconds, 1)}


def read_view(view: ServerView, public: TruncatedModel) -> list[list[int]]:
    """Return the tokens of every request, read by a public model's embedding as one observation of all rows."""
    rows, counts = rows_of(view.requests)
    observation = Observation.from_states(rows, public, columns_permuted="shared")
    tokens = iter(ClosedWeights(view.step).fit(observation.info, public).recover(observation).ids)
    return [[next(tokens) for _ in range(count)] for count in counts]


def stip_view(stip: Stip, prompts: Sequence[Sequence[int]]) -> ServerView:
    """Return what STIP's server holds after some requests; the model is not run."""
    stip.transcript.learnt.clear()
    for tokens in prompts:
        stip.ask(tokens)
    vectors = tuple(message.value for message in stip.transcript.seen(SERVER, label="inputs"))
    return ServerView(stip.server.permuted.head.weight, vectors)


def centaur_view(centaur: Centaur, prompts: Sequence[Sequence[int]]) -> ServerView:
    """Return what Centaur's server holds after some requests: it reconstructs users' vectors at the first norm.

    Position vectors (GPT-2 type) are subtracted, as the server has them itself.
    """
    ring, positions, shown = centaur.ring, centaur.permuted.positions, []
    for tokens in prompts:
        centaur.transcript.learnt.clear()
        centaur.show(tokens, 1)
        (seen,) = centaur.transcript.seen(SERVER, label="norm1", layer=1)
        added = 0 if positions is None else ring.decode(ring.encode(positions[: len(tokens)]))
        shown.append(seen.value - added)
    return ServerView(centaur.permuted.head.weight, tuple(shown), ring.step)


def _closed(
    scheme: str, weights: Weights, prompts: Sequence[Sequence[int]], seed: int
) -> tuple[ServerView, Keys]:
    """Return the view of a scheme's server, and the keys that it does not have."""
    if scheme == "centaur":
        centaur = Centaur(weights, seed=seed)
        return centaur_view(centaur, prompts), centaur.user.keys
    stip = Stip(weights, seed=seed)
    return stip_view(stip, prompts), stip.user.keys


def substitution(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Name tokens from requests alone: equal vectors are equal symbols, which are named by their neighbours.

    Requests and the attacker's own text are of different modules of Python's standard library.

    Args:
        spec: model, seed, requests, request_tokens, size (most kinds that statistics name); and with a language model:
            prior (its name), rounds, read (requests it reads in each), device.

    Raises:
        InputError: there is no tokenizer, there are too few texts, or the prior has another vocabulary.
    """
    weights, tokenizer = load_weights(spec["model"])
    if tokenizer is None:
        raise InputError(f"{spec['model']} has no tokenizer to read texts with")
    length = spec["request_tokens"]
    pieces, reference = (
        [ids[at : at + length] for ids in map(tuple, part) for at in range(0, len(ids) - length + 1, length)]
        for part in _two_parts(tokenizer, spec["seed"])
    )
    if len(pieces) < spec["requests"]:
        raise InputError(f"the texts give {len(pieces)} requests of {length} tokens, not {spec['requests']}")
    chosen = torch.randperm(len(pieces), generator=generator(spec["seed"], "requests"))[: spec["requests"]]
    prompts = [pieces[i] for i in chosen.tolist()]
    prior = _prior(spec, tokenizer) if spec.get("prior") else None
    stip = Stip(weights, seed=spec["seed"])
    symbols = collect_untied(stip_view(stip, prompts).requests)
    named = solve(symbols, reference, size=spec["size"], progress=progress)
    if prior is not None:
        named = refine(
            symbols, reference, named, prior, rounds=spec["rounds"], requests=spec["read"], progress=progress
        )
    hits = [
        float(sum(named.get(symbol) == token for symbol, token in zip(row, tokens, strict=True)))
        for row, tokens in zip(symbols, prompts, strict=True)
    ]
    meaning = {
        s: t for row, tokens in zip(symbols, prompts, strict=True) for s, t in zip(row, tokens, strict=True)
    }
    return as_figures(
        {
            "token_accuracy": ratio(hits, [float(length)] * len(hits)),
            "kinds_named": share([named.get(symbol) == token for symbol, token in meaning.items()]),
            "exact": share([hit == length for hit in hits]),
        }
    )


def _prior(spec: dict[str, Any], tokenizer: Any) -> TruncatedModel:
    """Load the public language model that the attacker reads symbols with.

    Raises:
        InputError: its tokens are not those of the attacked model.
    """
    device = parse_device(spec["device"])
    dtype = str(fast_dtype(device)).removeprefix("torch.")
    prior = load_model(spec["prior"], stream="logits", device=str(device), dtype=dtype)
    if prior.tokenizer is None or prior.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{spec['prior']} has another vocabulary than {spec['model']}; symbols are its tokens"
        )
    return prior


def _two_parts(tokenizer: Any, seed: int) -> list[list[list[int]]]:
    """Return tokens of texts for the users' requests (three quarters of the sources) and for the attacker.

    A source (module or topic) belongs to one side, and a text that is contained in another one counts once.
    """
    sources = standard_library_sources()
    order = torch.randperm(len(sources), generator=generator(seed, "documents")).tolist()
    seen: set[str] = set()
    parts: list[list[list[int]]] = [[], []]
    for place, i in enumerate(order):
        kept: list[str] = []
        for text in sorted(sources[i], key=len, reverse=True):
            line = " ".join(text.split())
            if line not in seen and not any(line in longer for longer in kept):
                seen.add(line)
                kept.append(line)
                parts[place >= 3 * len(order) // 4].append(tokenizer(text)["input_ids"])
    return parts


def revealed(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Match vocabulary on the states that a scheme's non-linear parts reveal to a party.

    The attacker has the open weights and what the party learnt at the first norm behind a layer. The error of the fixed
    point is measured on prompts of its own.

    Args:
        spec: model, prompts, limit, max_tokens, seed, scheme, layer, budget.
    """
    weights, prompts = model_and_prompts(spec)
    how, layer = REVEALING[spec["scheme"]], spec["layer"]
    if not 1 <= layer < len(weights.blocks):
        raise InputError(
            f"{spec['scheme']} reveals states behind layers 1 to {len(weights.blocks) - 1}, not {layer}"
        )
    weights = replace(weights, blocks=weights.blocks[: layer + 1])
    model = load_model(spec["model"], layer, device=spec["device"])
    info = Channel.parse([how.channel]).release(model, prompts[0][:2], generator(0))[0].info
    epsilon = _rounding(how, weights, model, layer, spec["seed"])
    attack = VocabMatch(epsilon=str(epsilon), budget=spec["budget"], setup="full").fit(
        info, model, spec["seed"]
    )
    results, truths = [], []
    for i, (tokens, shown) in enumerate(_shown(how, weights, prompts, layer, spec["seed"], info)):
        results.append(attack.recover(shown))
        truths.append(tokens)
        progress("prompts", i + 1, len(prompts))
    figures = _matched(results, truths)
    texts = [
        score_text(
            truth_ids=tokens, recovered_ids=result.ids,
            truth_text=model.text(tokens), recovered_text=model.text(result.ids),
        )
        for result, tokens in zip(results, truths, strict=True)
    ]  # fmt: skip
    return figures | as_figures({"rouge_l": mean([score["rouge_l"] for score in texts])})


def permuted_model(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Match states behind a layer as STIP's server, with its permuted model and its rebuilt vocabulary.

    The attacker has what the server's view holds (as a file), the permuted model as a checkpoint, and the states that
    this model computes from a user's vectors, shuffled further if so asked. It recovers symbols (``rebuild_tied``).

    Args:
        spec: model, prompts, limit, max_tokens, seed, device, layer, channel, budget.
    """
    weights, prompts = model_and_prompts(spec)
    layer, channel = spec["layer"], Channel.parse([spec["channel"]])
    stip = Stip(weights, seed=spec["seed"])
    names = {int(row): symbol for symbol, row in enumerate(stip.user.keys.vocabulary.tolist())}
    with TemporaryDirectory(dir=folder) as home:
        write_checkpoint(stip.server.permuted, spec["model"], Path(home) / "server")
        view = ServerView.load(stip_view(stip, prompts).save(Path(home)).parent)
        whole = with_table(Path(home) / "server", rebuild_tied(view).table, Path(home) / "whole")
        model = load_model(str(whole), layer, device=spec["device"])
        info = channel.release(model, [0, 1], generator(0))[0].info
        draw = generator(spec["seed"], "order")
        observations, truths = [], []
        for tokens in prompts:
            with torch.inference_mode():
                states = walk(stip.server.permuted, stip.user.encrypt(tokens), Plain())[1][layer]
            for stage in channel.defenses:
                states = stage.states(states, draw)[0]
            observations.append(Observation(states, info))
            truths.append([names[token] for token in tokens])
        attack = VocabMatch(budget=spec["budget"], setup="full")
        attack.progress = progress
        results = attack.fit(info, model, spec["seed"]).recover_batch(observations)
    return _matched(results, truths)


def unique_rows(spec: dict[str, Any], folder: Path, progress: Progress = silent) -> Figures:
    """Count the rows of an embedding table that equal another row, as they are and with their numbers sorted.

    Args:
        spec: model.
    """
    table = load_model(spec["model"], 0, stream="embed", device="cpu").embedding.float()
    counts = {}
    for name, rows in (("equal", table), ("equal_sorted", table.sort(dim=1).values)):
        seen = Counter(
            blake2b(row.tobytes(), digest_size=16).digest() for row in (rows + 0.0).numpy(force=True)
        )
        counts[name] = float(sum(count for count in seen.values() if count > 1))
    counts["equal_only_sorted"] = counts["equal_sorted"] - counts["equal"]
    return {name: exactly(value, len(table)) for name, value in {"rows": float(len(table)), **counts}.items()}


def _matched(results: Sequence[AttackResult], truths: Sequence[Sequence[int]]) -> Figures:
    """Return figures of what vocabulary matching recovered, and at what cost."""
    counts = [float(len(tokens)) for tokens in truths]
    right = [
        sum(a == b for a, b in zip(result.ids, tokens, strict=True))
        for result, tokens in zip(results, truths, strict=True)
    ]
    return as_figures(
        {
            "exact": share([n == count for n, count in zip(right, counts, strict=True)]),
            "token_accuracy": mean([n / count for n, count in zip(right, counts, strict=True)]),
            "verified": ratio(
                [float(sum(token.verified for token in result.tokens)) for result in results], counts
            ),
            "evaluated_tokens_per_token": ratio(
                [float(result.evaluated_tokens) for result in results], counts
            ),
            "seconds_per_prompt": mean([result.seconds for result in results]),
        }
    )


def _shown(
    how: _Revealing,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    layer: int,
    seed: int,
    info: ObservationInfo,
) -> Iterator[tuple[list[int], Observation]]:
    """Yield prompts, and what the party learnt of their states behind a layer."""
    run = how.make(weights, seed=seed)
    for tokens in prompts:
        run.transcript.learnt.clear()
        run.show(tokens, layer + 1)
        (seen,) = run.transcript.observations(how.party, "norm1", layer + 1, info)
        yield list(tokens), seen


def _rounding(how: _Revealing, weights: Weights, model: TruncatedModel, layer: int, seed: int) -> float:
    """Return a distance well above that of a right token's state to what the scheme shows of it."""
    draw = generator(seed, "own prompts")
    own = [
        torch.randint(len(weights.head.weight), (32,), generator=draw).tolist() for _ in range(NOISE_PROMPTS)
    ]
    info = Channel.parse([how.channel]).release(model, [0, 1], generator(0))[0].info
    matcher = choose_matcher("auto", info)
    worst = 0.0
    for tokens, shown in _shown(how, weights, own, layer, seed, info):
        table = matcher.table(
            candidates=matcher.view(model.encode(torch.tensor(tokens))),
            observed=matcher.prepare(shown.states),
        )
        worst = max(worst, float(table.amin(0).max()))
    return NOISE_ROOM * worst


def model_and_prompts(spec: dict[str, Any]) -> tuple[Weights, list[list[int]]]:
    weights, tokenizer = load_weights(spec["model"])
    prompts = load_prompts(spec["prompts"], limit=spec["limit"])
    return weights, [token_ids(tokenizer, p, spec["model"], most=spec["max_tokens"]) for p in prompts]


def _greedy(weights: Weights, tokens: Sequence[int], new: int) -> list[int]:
    ids = list(tokens)
    for _ in range(new):
        ids.append(int(walk(weights, weights.inputs(ids), Plain())[0][-1].argmax()))
    return ids[len(tokens) :]
