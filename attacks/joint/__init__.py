"""Joint decoding: the likeliest prompt behind states that were changed, shuffled, or shown only in part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hiddenlab.attacks.joint.beam import decode
from hiddenlab.attacks.joint.before import arrives, decode_behind, prefix_of
from hiddenlab.attacks.joint.clock import learn_clock
from hiddenlab.attacks.joint.displaced import place_free
from hiddenlab.attacks.joint.evidence import FEATURES, NOISE, TRACES, Learned
from hiddenlab.attacks.joint.gauge import learn_gauge
from hiddenlab.attacks.joint.hypotheses import Decoding, Effort, Engines, start
from hiddenlab.attacks.joint.moves import move_parts
from hiddenlab.attacks.joint.reading import Reader, fast_enough
from hiddenlab.attacks.joint.refine import Refined, refine_decodings
from hiddenlab.attacks.joint.reorder import reorder_decodings
from hiddenlab.attacks.joint.strength import first_step, settle, strength_of
from hiddenlab.attacks.joint.weights import learn_weights, weigh_noise
from hiddenlab.attacks.vocab_match.rank import LazyModel
from hiddenlab.attacks.vocab_match.screen import Screen
from hiddenlab.channel import Channel, as_whole, by_channel, suppose
from hiddenlab.core import Observation, Progress, Public, Recovery, TokenRecovery, silent
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.job import generator
from hiddenlab.lens import lens_of
from hiddenlab.match import choose_matcher
from hiddenlab.observation import check_observation
from hiddenlab.propose.store import adapter_for, openings_for, precedence_for, probes_for
from hiddenlab.slice import Prefix, Request, Slice

SURE = 16.0  # nats by which the token that a tokenizer puts first is likelier than any other

# Where the right candidate is the best so often, behind the right tokens, no candidate need be solved for.
CERTAIN = 0.99


@dataclass(frozen=True)
class Prepared:
    """What one channel at one site needs.

    Attributes:
        observed: the public facts that it is for. public: the same with what was estimated.
    """

    observed: Public
    public: Public
    slice: Slice
    engines: Engines
    reader: Reader
    learned: Learned

    @property
    def solves(self) -> bool:
        """Candidates can be solved for the noise on their embeddings: rows are out of order behind nothing but that.

        In half precision the finite differences would be rounding errors.
        """
        public = self.public
        return (
            public.rows_permuted
            and public.columns_permuted is None
            and public.noise_sigma is not None
            and not public.prefix_tokens
            and self.slice.dtype == torch.float32
        )


class JointDecoding:
    """Recovers the likeliest prompt by weighing probe, language model, traces in other rows, and states in context.

    For channels that change values, where no distance tells right from wrong by itself. A beam of hypotheses is
    extended token by token; a candidate is a token and the row that it explains. Evidence: the probe's probability
    (trained on states as the channel releases them), the language model's, the traces that a token leaves in the rows
    behind it, and the distance between the row and the candidate's state behind this hypothesis. How much each counts
    is learned on texts of the attacker's own. Nothing is verified, since the right state is not known exactly; margins
    are in nats, and negative where what follows spoke for a token.

    Knows: the weights, the released states, the channel. Does not know: tokens, permutations, noise. The strength of
    noise of which it is not told it finds out from the first prompt of a channel, and takes it to be that of all (see
    ``strength``).

    Args:
        beam: hypotheses kept, at least four times as many where rows are out of order or missing (``Effort.kept``).
            width: candidates run for each, many more where columns are shuffled and the best is in doubt. Where noise
            drowns what states say of an order, more hypotheses with fewer candidates read more (24 and 12, say).
            batch: prompts at once. model: ask the language model.
        sweeps: of the second look at noised embeddings (see ``refine``), which needs float32; 0 for none.
        rounds: of looking for unknown embeddings before the prompt (see ``before``) at most, also in float32; as many
            again where an order has to be begun anew.
        solved: where rows are out of order behind noise, the likeliest continuations of a prompt that are solved for
            the noise on their embeddings (see ``explain``), at every token, 16 say, also in float32; 0 for none. It
            takes minutes, and what it brings is not settled.
        orders: order rows behind one layer of noised embeddings by how much noise they need (see ``reorder``), also in
            float32; it takes minutes a prompt.
        seed: of learning. progress: where progress is reported.
    """

    def __init__(
        self,
        beam: int = 8,
        width: int = 48,
        batch: int = 8,
        model: bool = True,
        sweeps: int = 6,
        rounds: int = 3,
        solved: int = 0,
        orders: bool = False,
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        if min(beam, width, batch) < 1:
            raise InputError(f"beam, width and batch must be at least 1, not {beam}, {width} and {batch}")
        if min(sweeps, rounds, solved) < 0:
            raise InputError(
                f"sweeps, rounds and solved must be at least 0, not {sweeps}, {rounds} and {solved}"
            )
        self.effort, self.sweeps, self.rounds = Effort(beam, width, solved=solved), sweeps, rounds
        self.batch, self.asks, self.seed, self.progress = batch, model, seed, progress
        self.orders = orders
        self._prepared: Prepared | None = None
        self._found_begun: tuple[Prepared, bool] | None = None  # see ``_begins``
        self._model: tuple[Slice, LazyModel] | None = None
        self._screen: Screen | None = None

    def setup(self, observation: Observation, slice: Slice, generator: torch.Generator) -> dict[str, float]:
        """Train or load the probes and learn the weights, for all observations of one channel.

        Returns:
            ``probe_seconds`` (0 where all were cached), the weight of each piece of evidence, and ``noise_sigma`` where
            it was estimated.
        """
        prepared, seconds = self.prepare(observation, slice)
        learned = {
            f"weight_{name}": float(x) for name, x in zip(FEATURES, prepared.learned.weights, strict=True)
        }
        if prepared.public.noise_sigma != prepared.observed.noise_sigma:
            learned["noise_sigma"] = float(prepared.public.noise_sigma or 0.0)
        return {"probe_seconds": seconds, **learned}

    def prepare(self, observation: Observation, slice: Slice) -> tuple[Prepared, float]:
        """What ``setup`` makes, kept for the next observation of the same channel, and the seconds probes took.

        Raises:
            InputError: the observation does not fit the slice. NotApplicableError: it shows no states.
        """
        check_observation(observation, slice)
        public = as_whole(observation.public)
        if lens_of(public) is not None or observation.states.shape[1] != slice.width:
            raise NotApplicableError("joint decoding needs whole states")
        self._check(observation)
        kept, channel = self._prepared, Channel.parse(list(public.channel))
        if kept is not None and (kept.observed, kept.slice) == (public, slice):
            return kept, 0.0
        if channel.unknown:
            prepared, seconds = self._estimate(observation, channel, public, slice)
        else:
            prepared, seconds = self._learn(public, slice)
        if prepared.solves and self.effort.solved and prepared.learned.right < CERTAIN:
            prepared = self._weigh_noise(prepared)
        self._prepared = replace(prepared, observed=public)
        return self._prepared, seconds

    def _weigh_noise(self, prepared: Prepared) -> Prepared:
        """Solve for candidates from now on, if what that says speaks against wrong ones."""
        reader = prepared.reader
        engines = replace(prepared.engines, slice=prepared.slice, sigma=prepared.public.noise_sigma)
        with torch.inference_mode():
            learned = weigh_noise(prepared.learned, reader.channel, engines, reader, self.seed, self.progress)
        return replace(prepared, engines=engines, learned=learned) if learned.weights[NOISE] < 0 else prepared

    def _speaker(self, slice: Slice) -> Prefix | None:
        """The language model, if it is to be asked, with what it reads before every prompt."""
        if self.asks and (self._model is None or self._model[0] is not slice):
            self._model = slice, LazyModel(slice)
        return self._model[1].opened if self.asks and self._model is not None else None

    def _check(self, observation: Observation) -> None:
        if observation.public.positions is not None and not self.asks:
            raise NotApplicableError("tokens without a row can only be guessed by a language model")

    def _learn(self, public: Public, slice: Slice) -> tuple[Prepared, float]:
        """Probes and weights for a channel of known strength, and the seconds probes took."""
        speaker = self._speaker(slice)
        shuffled = public.columns_permuted is not None
        probes, seconds = probes_for(slice, public, (0,) if shuffled else (0, *TRACES), self.progress)
        openings, made = openings_for(slice, public, self.progress)
        adapter, described = adapter_for(slice, self.progress) if shuffled else (None, 0.0)
        precedence, compared = precedence_for(slice, public, self.progress)
        seconds += made + described + compared
        channel, matcher = Channel.parse(list(public.channel)), choose_matcher("auto", public)
        with torch.inference_mode():
            clock = learn_clock(slice, channel, matcher, self.seed) if public.rows_permuted else None
            mixed = public.rows_permuted or shuffled
            added = channel.added(slice, generator(self.seed, "joint", "before"))
            before = prefix_of(added, slice) if len(added) else None
            gauge = learn_gauge(slice, channel, matcher, self.seed, before) if mixed else None
            reader = Reader(slice, channel, matcher, tuple(probes), clock, gauge, openings, precedence)
            screen = self._screen if self._screen is not None and self._screen.of is slice else None
            if screen is None and Screen.pays(slice):
                screen = Screen(slice)
            fast = screen is not None and fast_enough(screen, channel, matcher, self.seed)
            self._screen = screen if fast or shuffled else None
            runs = screen.slice if screen is not None and fast else slice
            first = _opening(slice, None if speaker is None else speaker.slice)
            engines = Engines(
                runs, matcher, speaker, first, adapter, None if fast else self._screen,
                prefix_of(added, runs) if len(added) else None, public.prefix_tokens,
            )  # fmt: skip
            learned = learn_weights(channel, engines, reader, self.seed, self.progress)
        return Prepared(public, public, slice, engines, reader, learned), seconds

    def _estimate(
        self, observation: Observation, channel: Channel, public: Public, slice: Slice
    ) -> tuple[Prepared, float]:
        """The same for a channel of unknown strength, which this observation tells."""
        made, seconds = dict[float, Prepared](), 0.0

        def found(supposed: float) -> float:
            nonlocal seconds
            made[supposed], spent = self._learn(suppose(public, supposed), slice)
            seconds += spent
            with torch.inference_mode():
                (decoding,) = self._decode([observation], made[supposed])
                steps = decoding.beam[0].steps
                shown = [(step.row, place) for place, step in enumerate(steps) if step.row >= 0]
                rows, places = torch.tensor(shown, device=slice.device).T
                tokens = torch.tensor([step.token for step in steps], device=slice.device)
                matcher = made[supposed].engines.matcher
                seen = decoding.view.shown[rows]
                return strength_of(seen, places, tokens, channel.whole(), matcher, slice, self.seed)

        step, strength = settle(first_step(slice), found)
        return replace(made[step], public=suppose(public, strength)), seconds

    def recover(self, observation: Observation, slice: Slice, generator: torch.Generator) -> Recovery:
        """Recover one prompt; see ``recover_batch``."""
        return self.recover_batch([observation], slice, generator)[0]

    def recover_batch(
        self, observations: Sequence[Observation], slice: Slice, generator: torch.Generator
    ) -> list[Recovery]:
        """Recover prompts of one channel together.

        Raises:
            InputError: an observation does not fit the slice. NotApplicableError: it shows no states, or rows are
                missing and there is no language model.
        """
        groups = by_channel(observations, self.batch)
        return [one for group in groups for one in self._recover(group, slice)]

    def _recover(self, observations: Sequence[Observation], slice: Slice) -> list[Recovery]:
        prepared, _ = self.prepare(observations[0], slice)
        for observation in observations:
            check_observation(observation, slice)
            self._check(observation)
        started = time.perf_counter()
        with torch.inference_mode():
            decodings = self._decode(observations, prepared)
            decodings = self._decode_behind(observations, decodings, prepared)
            self._reorder(observations, decodings, prepared)
        refined = self._look_again(observations, decodings, prepared)
        seconds = time.perf_counter() - started
        costs = [
            one.evaluated + (0 if new is None else new.evaluated)
            for one, new in zip(decodings, refined, strict=True)
        ]
        return [
            _recovery(one, new, cost, seconds * cost / max(1, sum(costs)))
            for one, new, cost in zip(decodings, refined, costs, strict=True)
        ]

    def _decode(self, observations: Sequence[Observation], prepared: Prepared) -> list[Decoding]:
        engines, weights = prepared.engines, prepared.learned.weights
        decodings = [start(prepared.reader.read(one), engines, weights) for one in observations]
        decode(decodings, engines, prepared.learned, self.effort, self.progress)
        move_parts(decodings, engines, weights, self.progress)
        return decodings

    def _decode_behind(
        self, observations: Sequence[Observation], decodings: Sequence[Decoding], prepared: Prepared
    ) -> list[Decoding]:
        """Find what stood before each decoded prompt and decode it again behind that, as long as more is explained.

        Only where every token has a row, and in float32: what is looked for is smaller than bfloat16's rounding.
        """
        public, slice, out = prepared.public, prepared.slice, list(decodings)
        whole = [i for i, one in enumerate(observations) if one.public.positions is None]
        if not public.prefix_tokens or slice.dtype != torch.float32:
            return out
        again = decode_behind(
            [out[i] for i in whole],
            replace(prepared.engines, slice=slice),
            prepared.learned,
            self.effort.less(),
            public.prefix_tokens,
            self.rounds,
            lambda: self._begins(prepared),
            self.progress,
        )
        for i, one in zip(whole, again, strict=True):
            out[i] = one
        return out

    def _reorder(
        self, observations: Sequence[Observation], decodings: Sequence[Decoding], prepared: Prepared
    ) -> None:
        """Order rows behind one layer anew by how much noise they need, where every token has a row."""
        if not (self.orders and prepared.solves and place_free(prepared.slice)):
            return
        whole = [i for i, one in enumerate(observations) if one.public.positions is None]
        sigma = prepared.public.noise_sigma
        assert sigma is not None
        reorder_decodings(
            [decodings[i] for i in whole],
            [observations[i].states.to(prepared.slice.device).float() for i in whole],
            replace(prepared.engines, slice=prepared.slice), prepared.learned, sigma, self.seed,
            self.progress,
        )  # fmt: skip

    def _begins(self, prepared: Prepared) -> bool:
        """Prompts that stay unexplained are begun anew; not where rows are changed in another way as well.

        Found out when the first of them asks, in whose time it counts: most channels never need to know.
        """
        if self._found_begun is None or self._found_begun[0] is not prepared:
            size, channel = prepared.public.prefix_tokens, prepared.reader.channel
            found = prepared.public.noise_sigma is None and arrives(
                channel, prepared.slice, prepared.engines.matcher, size, self.seed, self.progress
            )
            self._found_begun = prepared, found
        return self._found_begun[1]

    def _look_again(
        self, observations: Sequence[Observation], decodings: Sequence[Decoding], prepared: Prepared
    ) -> list[Refined | None]:
        """Solve for noised embeddings, of prompts whose every token has a row in known coordinates.

        In half precision the finite differences would be rounding errors.
        """
        public, slice = prepared.public, prepared.slice
        sigma, out = public.noise_sigma, list[Refined | None]([None] * len(decodings))
        if (
            not self.sweeps
            or sigma is None
            or public.columns_permuted is not None
            or slice.dtype != torch.float32
        ):
            return out
        whole = [i for i, one in enumerate(observations) if one.public.positions is None]
        states = [observations[i].states.to(slice.device).float() for i in whole]
        solved = refine_decodings(
            [decodings[i] for i in whole],
            states,
            slice,
            sigma,
            self.sweeps,
            public.prefix_tokens,
            self.progress,
        )
        for i, one in zip(whole, solved, strict=True):
            out[i] = one
        return out

    def __repr__(self) -> str:
        return (
            f"JointDecoding(beam {self.effort.beam}; knows the weights, the released states and the channel, "
            "not tokens, permutations or noise)"
        )


def _opening(slice: Slice, model: Slice | None) -> Tensor | None:
    """What the language model expects first: the tokenizer's own start of prompts, or what follows a document's end."""
    if model is None:
        return None
    # Some tokenizers append a token: only what a text begins with counts.
    own = [] if slice.tokenizer is None else slice.tokenizer("a")["input_ids"][:1]
    own = [token for token in own if token in slice.tokenizer.all_special_ids]
    if own or not slice.special_ids:
        expected = torch.zeros(slice.vocab_size, device=model.device)
        expected[own] = SURE
        return expected.log_softmax(-1)
    with torch.inference_mode():
        first = torch.tensor(slice.special_ids[:1], device=model.device)
        return model.run([Request(model.prefix(), first)], keep=False)[0].chain[0].float().log_softmax(-1)


def _recovery(decoding: Decoding, refined: Refined | None, evaluated: int, seconds: float) -> Recovery:
    steps = decoding.beam[0].steps
    if refined is None:
        tokens, margins, calls = [step.token for step in steps], [step.margin for step in steps], 0
    else:
        tokens, margins, calls = refined.tokens, refined.margins, refined.calls
    found = []
    for token, margin, step in zip(tokens, margins, steps, strict=True):
        # The distance of a mended token was not measured.
        distance = step.distance if token == step.token else float("nan")
        found.append(TokenRecovery(token, step.row, distance, margin, step.evaluated, False))
    return Recovery(tuple(found), evaluated, decoding.calls + calls, seconds, "complete")
