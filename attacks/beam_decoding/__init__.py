"""Recover the likeliest prompt from hidden states that were changed, shuffled, or shown only in part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hiddenlab.attacks.beam_decoding.beam import decode
from hiddenlab.attacks.beam_decoding.distortion_model import learn_distortion_model
from hiddenlab.attacks.beam_decoding.features import FEATURES, TRACES, Learned
from hiddenlab.attacks.beam_decoding.hypotheses import Decoding, Effort, Engines, start
from hiddenlab.attacks.beam_decoding.local_search import move_parts
from hiddenlab.attacks.beam_decoding.noise_strength import first_step, settle, strength_of
from hiddenlab.attacks.beam_decoding.order_linearized import place_free
from hiddenlab.attacks.beam_decoding.order_refine import reorder_decodings
from hiddenlab.attacks.beam_decoding.position_model import learn_position_model
from hiddenlab.attacks.beam_decoding.prefix_inversion import arrives, decode_behind, prefix_of
from hiddenlab.attacks.beam_decoding.row_features import Reader, fast_enough
from hiddenlab.attacks.beam_decoding.weights import learn_weights
from hiddenlab.base import Attack
from hiddenlab.channels import Channel
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.input_noise import are_clipped, is_noisy, sigma_of
from hiddenlab.matching.distance import choose_matcher
from hiddenlab.matching.ranking import LazyModel
from hiddenlab.matching.screening import Screen
from hiddenlab.models import Prefix, Request, TruncatedModel
from hiddenlab.observation import parts_of_attention
from hiddenlab.preparations import as_whole, by_channel, suppose
from hiddenlab.projections import projection_of
from hiddenlab.proposals.store import adapter_for, first_token_table_for, pairwise_order_for, probes_for
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction
from hiddenlab.utils.random import generator

EVIDENCE = tuple(name.replace(" ", "-") for name in FEATURES if name != "language model")
SURE = 16.0  # nats by which the tokenizer's own first token is likelier than any other


@dataclass(frozen=True)
class Prepared:
    """Everything that beam decoding needs for one channel at one site.

    Attributes:
        observed: the public facts that it is for. info: the same facts with what was estimated (the noise strength).
    """

    observed: ObservationInfo
    info: ObservationInfo
    model: TruncatedModel
    engines: Engines
    reader: Reader
    learned: Learned

    @property
    def solves(self) -> bool:
        """Whether orders can be compared by the noise they need: rows are out of order and changed by noise alone.

        Float32 is required: in half precision the finite differences would be rounding errors.
        """
        info = self.info
        return (
            info.rows_permuted
            and info.columns_permuted is None
            and is_noisy(info)
            and not are_clipped(info)
            and not info.prefix_tokens
            and self.model.dtype == torch.float32
        )


class BeamDecoding(Attack):
    """Recover the likeliest prompt by beam search over tokens and rows.

    For channels that change values, where no distance tells right from wrong by itself. A beam of hypotheses is
    extended token by token; a candidate is a token and the row that it explains. Evidence: the probe's probability
    (trained on states as the channel releases them), the language model's probability, the traces that a token leaves
    in the rows behind it, and the distance between the row and the candidate's state behind this hypothesis. The weight
    of each is learned on the attacker's own texts. Nothing is verified, since the right state is not known exactly.
    Margins are in nats; a margin is negative where another token scored better at its place and later tokens decided
    against it.

    Knows: the weights, the released states, the channel. Does not know: tokens, permutations, noise. Where the strength
    of noise is not given, it is estimated from the first prompt of a channel and used for all (see ``noise_strength``);
    in an independent run from the first prompt of each batch.

    Args:
        beam: hypotheses kept, at least four times as many where rows are out of order or missing (``Effort.kept``).
        width: candidates run for each hypothesis, many more where columns are shuffled and the best is in doubt. Where
            noise hides the order, more hypotheses with fewer candidates recover more (24 and 12, say).
        batch: prompts at once. lm: use the language model.
        rounds: searches for unknown embeddings before the prompt (see ``prefix_inversion``) at most, in float32; as
            many again where an order has to be started anew.
        orders: order rows behind one layer of noised embeddings by how much noise they need (see ``order_refine``),
            also in float32; it takes minutes a prompt.
        without: parts left out, joined by ``+``: a kind of evidence by name (``probe``, ``trace-1`` and so on),
            ``lookahead`` (what unused rows are expected to bring), ``widening`` (more candidates where the best is in
            doubt), ``moves`` (rows moved once all are placed). The others are options: ``lm``, ``rounds``.
    """

    use_when = "states are noised, quantized or shuffled, and no distance tells right from wrong"
    parts = (*EVIDENCE, "lookahead", "widening", "moves")

    def __init__(
        self,
        beam: int = 8,
        width: int = 48,
        batch: int = 8,
        lm: bool = True,
        rounds: int = 3,
        orders: bool = False,
        without: str = "",
    ) -> None:
        if min(beam, width, batch) < 1:
            raise InputError(f"beam, width and batch must be at least 1, not {beam}, {width} and {batch}")
        if rounds < 0:
            raise InputError(f"rounds must be at least 0, not {rounds}")
        self.without = self.left_out(without)
        limits = {name: False for name in ("lookahead", "moves") if name in self.without}
        self.effort, self.rounds = Effort(beam, width, **limits), rounds
        self.batch, self.asks = batch, lm
        self.orders = orders
        self._prepared: Prepared | None = None
        self._begins_known: tuple[Prepared, bool] | None = None  # see ``_begins``
        self._lm: tuple[TruncatedModel, LazyModel] | None = None
        self._screen: Screen | None = None

    def _forget(self) -> None:
        self._prepared = None

    def reset(self) -> None:
        """Forget a strength of noise that was estimated from an earlier prompt."""
        if self._prepared is not None and Channel.parse(list(self._prepared.observed.channel)).unknown:
            self._prepared = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Train or load the probes and learn the weights, for all observations of one channel.

        Where the strength of noise is not known, this waits for the first prompt, from which it is estimated.

        Returns:
            ``probe_seconds`` (0 where all were cached), the weight of each feature, and ``noise_sigma`` where it was
                estimated.
        """
        self._check(info)
        whole = as_whole(info)
        channel = Channel.parse(list(whole.channel))
        if channel.unknown:
            return {}
        if self._prepared is None or (self._prepared.observed, self._prepared.model) != (whole, self.model):
            return self._keep(whole, *self._learn(whole, self.model))
        return self._measured(self._prepared, 0.0)

    def prepare(self, observation: Observation) -> Prepared:
        """Return what a channel needs: what ``fit`` prepared, or what is made now from this observation.

        Raises:
            NotApplicableError: the observation shows no states.
        """
        self._check(observation.info)
        info, model = as_whole(observation.info), self.model
        kept, channel = self._prepared, Channel.parse(list(info.channel))
        if kept is None or (kept.observed, kept.model) != (info, model):
            started = time.perf_counter()
            made = (
                self._estimate(observation, channel, info, model)
                if channel.unknown
                else self._learn(info, model)
            )
            measured = self._keep(info, *made)
            self.measured = {**measured, "estimation_seconds": time.perf_counter() - started}
        assert self._prepared is not None
        return self._prepared

    def _keep(self, info: ObservationInfo, prepared: Prepared, seconds: float) -> dict[str, float | str]:
        self._prepared = replace(prepared, observed=info)
        return self._measured(self._prepared, seconds)

    def _measured(self, prepared: Prepared, seconds: float) -> dict[str, float | str]:
        learned: dict[str, float | str] = {
            f"weight_{name}": float(x) for name, x in zip(FEATURES, prepared.learned.weights, strict=True)
        }
        if prepared.info.noise_sigma != prepared.observed.noise_sigma:
            learned["noise_sigma"] = float(prepared.info.noise_sigma or 0.0)
        return {"probe_seconds": seconds, **learned}

    def _speaker(self, model: TruncatedModel) -> Prefix | None:
        """Return the language model with what it reads before every prompt, None where it is not used."""
        if self.asks and (self._lm is None or self._lm[0] is not model):
            self._lm = model, LazyModel(model)
        return self._lm[1].opened if self.asks and self._lm is not None else None

    def _check(self, info: ObservationInfo) -> None:
        if projection_of(info) is not None or parts_of_attention(info):
            raise NotApplicableError("beam decoding needs whole states")
        if info.positions is not None and not self.asks:
            raise NotApplicableError("tokens without a row can only be guessed by a language model")

    def _learn(self, info: ObservationInfo, model: TruncatedModel) -> tuple[Prepared, float]:
        """Learn probes and weights for a channel of known noise strength; also return the seconds that probes took."""
        speaker = self._speaker(model)
        shuffled = info.columns_permuted is not None
        probes, seconds = probes_for(model, info, (0,) if shuffled else (0, *TRACES), self.progress)
        first_tokens, made = first_token_table_for(model, info, self.progress)
        adapter, described = adapter_for(model, self.progress) if shuffled else (None, 0.0)
        pairwise_order, compared = pairwise_order_for(model, info, self.progress)
        seconds += made + described + compared
        channel, matcher = Channel.parse(list(info.channel)), choose_matcher("auto", info)
        with torch.inference_mode():
            position_model = (
                learn_position_model(model, channel, matcher, self.seed) if info.rows_permuted else None
            )
            mixed = info.rows_permuted or shuffled
            added = channel.added(model, generator(self.seed, "joint", "before"))
            before = prefix_of(added, model) if len(added) else None
            distortion_model = (
                learn_distortion_model(model, channel, matcher, self.seed, before) if mixed else None
            )
            reader = Reader(
                model,
                channel,
                matcher,
                tuple(probes),
                position_model,
                distortion_model,
                first_tokens,
                pairwise_order,
            )
            screen = self._screen if self._screen is not None and self._screen.of is model else None
            if screen is None and Screen.pays(model):
                screen = Screen(model)
            fast = screen is not None and fast_enough(screen, channel, matcher, self.seed)
            self._screen = screen if fast or shuffled else None
            runs = screen.model if screen is not None and fast else model
            first = _opening(model, None if speaker is None else speaker.model)
            engines = Engines(
                runs, matcher, speaker, first, adapter, None if fast else self._screen,
                prefix_of(added, runs) if len(added) else None, info.prefix_tokens,
            )  # fmt: skip
            used = [name.replace(" ", "-") not in self.without for name in FEATURES]
            learned = learn_weights(channel, engines, reader, self.seed, used, self.progress)
            if "widening" in self.without:
                learned = replace(learned, lead=float("-inf"))
        return Prepared(info, info, model, engines, reader, learned), seconds

    def _estimate(
        self, observation: Observation, channel: Channel, info: ObservationInfo, model: TruncatedModel
    ) -> tuple[Prepared, float]:
        """Learn probes and weights for a channel of unknown noise strength, estimated from this observation."""
        made, seconds = dict[float, Prepared](), 0.0

        def estimate(supposed: float) -> float:
            nonlocal seconds
            made[supposed], spent = self._learn(suppose(info, supposed), model)
            seconds += spent
            with torch.inference_mode():
                (decoding,) = self._decode([observation], made[supposed])
                steps = decoding.beam[0].steps
                shown = [(step.row, place) for place, step in enumerate(steps) if step.row >= 0]
                rows, places = torch.tensor(shown, device=model.device).T
                tokens = torch.tensor([step.token for step in steps], device=model.device)
                matcher = made[supposed].engines.matcher
                seen = decoding.view.shown[rows]
                return strength_of(seen, places, tokens, channel.whole(), matcher, model, self.seed)

        step, strength = settle(first_step(model), estimate)
        return replace(made[step], info=suppose(info, strength)), seconds

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        """Recover prompts of one channel together.

        Raises:
            NotApplicableError: there are no whole states, or rows are missing and there is no language model.
        """
        groups = by_channel(observations, self.batch)
        return [result for group in groups for result in self._recover_group(group)]

    def _recover_group(self, observations: Sequence[Observation]) -> list[AttackResult]:
        prepared = self.prepare(observations[0])
        for observation in observations:
            self._check(observation.info)
        started = time.perf_counter()
        with torch.inference_mode():
            decodings = self._decode(observations, prepared)
            decodings = self._decode_behind(observations, decodings, prepared)
            self._reorder(observations, decodings, prepared)
        seconds = time.perf_counter() - started
        total = max(1, sum(decoding.evaluated for decoding in decodings))
        return [_recovery(decoding, seconds * decoding.evaluated / total) for decoding in decodings]

    def _decode(self, observations: Sequence[Observation], prepared: Prepared) -> list[Decoding]:
        engines, weights = prepared.engines, prepared.learned.weights
        decodings = [
            start(prepared.reader.read(observation), engines, weights, self.effort)
            for observation in observations
        ]
        decode(decodings, engines, prepared.learned, self.effort, self.progress)
        move_parts(decodings, engines, weights, self.effort, self.progress)
        return decodings

    def _decode_behind(
        self, observations: Sequence[Observation], decodings: Sequence[Decoding], prepared: Prepared
    ) -> list[Decoding]:
        """Find the unknown embeddings before each prompt and decode behind them, as long as more is explained.

        Only where every token has a row, and in float32: bfloat16's rounding hides the differences that matter here.
        """
        info, model, results = prepared.info, prepared.model, list(decodings)
        whole = [i for i, observation in enumerate(observations) if observation.info.positions is None]
        if not info.prefix_tokens or model.dtype != torch.float32:
            return results
        again = decode_behind(
            [results[i] for i in whole],
            replace(prepared.engines, model=model),
            prepared.learned,
            self.effort.less(),
            info.prefix_tokens,
            self.rounds,
            lambda: self._begins(prepared),
            self.progress,
        )
        for i, decoding in zip(whole, again, strict=True):
            results[i] = decoding
        return results

    def _reorder(
        self, observations: Sequence[Observation], decodings: Sequence[Decoding], prepared: Prepared
    ) -> None:
        """Order rows behind one layer again by how much noise they need, where every token has a row."""
        if not (self.orders and prepared.solves and place_free(prepared.model)):
            return
        whole = [i for i, observation in enumerate(observations) if observation.info.positions is None]
        sigma = sigma_of(prepared.info, prepared.model.embedding.shape[1])
        assert sigma is not None
        reorder_decodings(
            [decodings[i] for i in whole],
            [observations[i].states.to(prepared.model.device).float() for i in whole],
            replace(prepared.engines, model=prepared.model), prepared.learned, sigma, self.seed,
            self.progress,
        )  # fmt: skip

    def _begins(self, prepared: Prepared) -> bool:
        """Return whether prompts that stay unexplained are started again from their first rows.

        They are not where the channel also changes rows in another way. This is measured when the first such prompt
        asks, and counts in its time: most channels never need it.
        """
        if self._begins_known is None or self._begins_known[0] is not prepared:
            size, channel = prepared.info.prefix_tokens, prepared.reader.channel
            arrived = not is_noisy(prepared.info) and arrives(
                channel, prepared.model, prepared.engines.matcher, size, self.seed, self.progress
            )
            self._begins_known = prepared, arrived
        return self._begins_known[1]

    def __repr__(self) -> str:
        return (
            f"BeamDecoding(beam {self.effort.beam}; knows the weights, the released states and the channel, "
            "not tokens, permutations or noise)"
        )


def _opening(model: TruncatedModel, lm: TruncatedModel | None) -> Tensor | None:
    """Return log-probabilities ``[v]`` of the first token: the tokenizer's own start, or what follows a document."""
    if lm is None:
        return None
    # Some tokenizers append a token: only the first one counts.
    own = [] if model.tokenizer is None else model.tokenizer("a")["input_ids"][:1]
    own = [token for token in model.embedded(own) if token in model.tokenizer.all_special_ids]
    if own or not model.special_ids:
        expected = torch.zeros(model.vocab_size, device=lm.device)
        expected[own] = SURE
        return expected.log_softmax(-1)
    with torch.inference_mode():
        first = torch.tensor(model.special_ids[:1], device=lm.device)
        return lm.run([Request(lm.prefix(), first)], keep=False)[0].states[0].float().log_softmax(-1)


def _recovery(decoding: Decoding, seconds: float) -> AttackResult:
    predictions = tuple(
        TokenPrediction(step.token, step.row, step.distance, step.margin, step.evaluated, False)
        for step in decoding.beam[0].steps
    )
    return AttackResult(predictions, decoding.evaluated, decoding.calls, seconds, "complete")
