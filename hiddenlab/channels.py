"""Release hidden states through a channel: the defenses that they pass between provider and attacker.

A defense is one stage. It may change how the provider loads the model, the tokens, the input embeddings, or the
states, and it says which of its facts are public. Stages of one level apply left to right. The levels follow one
another as in the computation (load, tokens, inputs, states), so ``seq-perm`` and ``gaussian`` have the same effect in
either order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.code_files import load_named
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.models import Request, TruncatedModel
from hiddenlab.models.quantized import quiet_bitsandbytes
from hiddenlab.models.request import packs
from hiddenlab.models.tokens import most_tokens
from hiddenlab.registry import stages_of
from hiddenlab.secret_maps import mixes_rows
from hiddenlab.stages import (
    LOAD_OPTIONS,
    Defense,
    Mixing,
    Replacement,
    Stage,
    Vocabulary,
    added_rows,
    build_defense,
    changes_states,
    check_release,
    has_unknown_strength,
    load_options,
    overrides,
    permutes_rows,
    replaces_tokens,
    selects_rows,
    with_known_name,
    with_strength,
)
from hiddenlab.text import count_of
from hiddenlab.types import GroundTruth, Observation, ObservationInfo, Site
from hiddenlab.utils.random import Draws, generator

OfTexts = Callable[[list[Tensor]], list[Tensor]]  # the provider's states of inputs
SELECTION_FACTS = ("tokens", "shard")  # facts of prompts of which only some rows are shown


@dataclass(frozen=True)
class _Prepared:
    """One prompt in the channel: what the provider runs, and the randomness drawn for it."""

    tokens: tuple[int, ...]
    computed: tuple[int, ...] | None
    inputs: Tensor
    seed: int
    draws: Draws


class Channel:
    """Defenses applied left to right; the model's owner runs them, the attacker sees what they release.

    Raises:
        InputError: two stages contradict each other.
    """

    def __init__(self, defenses: Sequence[Defense]) -> None:
        self.defenses = tuple(defenses)
        self.specs: tuple[str, ...] = tuple(defense.spec for defense in self.defenses)
        self._changes_inputs = any(overrides(defense, "inputs") for defense in self.defenses)
        self._providers: dict[tuple[Any, ...], TruncatedModel] = {}
        self._tables: WeakKeyDictionary[TruncatedModel, Tensor] = WeakKeyDictionary()
        self._vocabularies: WeakKeyDictionary[TruncatedModel, Vocabulary] = WeakKeyDictionary()
        selecting = [defense.spec for defense in self.defenses if selects_rows(defense)]
        if selecting and (len(selecting) > 1 or any(permutes_rows(d) for d in self.defenses)):
            raise InputError(
                f"{selecting[0]} shows rows of known positions; it goes with neither permuted rows nor another "
                "choice of rows"
            )
        for i, defense in enumerate(self.defenses):
            if not added_rows(defense):
                continue
            if selecting:
                raise InputError(f"{selecting[0]} shows rows of known positions; {defense.spec} hides them")
            before = [other.spec for other in self.defenses[:i] if changes_states(other)]
            if isinstance(defense, Mixing) and before:
                raise InputError(f"{defense.spec} adds plain states; give it before {before[0]}")
        if len(unknown := [defense.spec for defense in self.defenses if has_unknown_strength(defense)]) > 1:
            raise InputError(f"{' and '.join(unknown)}: only one stage may be of unknown strength")
        if len(replacing := [defense.spec for defense in self.defenses if replaces_tokens(defense)]) > 1:
            raise InputError(f"{' and '.join(replacing)}: only one stage may replace tokens")
        # Contradictory load options are refused here, before any model is loaded.
        load_options(self.defenses, dict.fromkeys(LOAD_OPTIONS))

    @classmethod
    def parse(cls, specs: Sequence[str | Defense], files: bool = False) -> "Channel":
        """Build a channel from specs such as ``["gaussian:sigma=0.01", "seq-perm"]`` or defenses; empty is identity.

        A spec may hold several stages, joined by ``+``.

        An attacker builds the defenses again from their specs. So the class of a defense of one's own gets the name in
        its ``spec``, in this process.

        Args:
            files: load the Python files that specs name. Only for specs that the user gave: the code runs.

        Raises:
            UnknownNameError: unknown defense.
            InputError: unknown, missing or malformed parameter; a defense's spec names another class.
            HiddenlabError: a plugin's class lacks a part of ``Defense``.
        """
        stages = [stage for spec in specs for stage in (stages_of(spec) if isinstance(spec, str) else [spec])]
        if files:
            for stage in stages:
                if isinstance(stage, str):
                    load_named("defenses", stage)
        return cls(
            [build_defense(stage) if isinstance(stage, str) else with_known_name(stage) for stage in stages]
        )

    def whole(self) -> "Channel":
        """Return the channel without the stages that only leave rows out; shown rows went through all others."""
        return Channel([defense for defense in self.defenses if not selects_rows(defense)])

    def of_shown_tokens(self) -> "Channel":
        """Return what happens between the tokens that the model runs and their rows: ``whole``, nothing replaced."""
        kept = [defense for defense in self.whole().defenses if not replaces_tokens(defense)]
        return Channel(kept)

    @property
    def unknown(self) -> bool:
        """Whether the strength of a stage is the provider's secret."""
        return any(map(has_unknown_strength, self.defenses))

    def supposed(self, strength: float) -> "Channel":
        """Return the channel with an assumed strength in the stage of unknown strength."""
        return Channel([with_strength(defense, strength) for defense in self.defenses])

    def provider_model(self, model: TruncatedModel) -> TruncatedModel:
        """Return the truncated model that the provider runs: the given one, or the same layers with other load options.

        Raises:
            InputError: the model cannot be loaded that way.
        """
        plain = {"dtype": _name(model.dtype), "quantization": model.quantization}
        options = load_options(self.defenses, plain)
        if options == plain:
            return model
        key = (model.ref, model.site, str(model.device), *options.values())
        if key not in self._providers:
            with quiet_bitsandbytes():
                self._providers[key] = model.sibling(model.site.layer, stream=model.site.stream, **options)
        provider = self._providers[key]
        provider.max_pass_tokens = model.max_pass_tokens
        return provider

    def release(
        self,
        model: TruncatedModel,
        prompt: str | Sequence[int],
        seed: int | torch.Generator = 0,
        key: int | None = None,
    ) -> tuple[Observation, GroundTruth]:
        """Release the states of one prompt.

        Args:
            model: of the attacker; the provider runs it too, or the same layers loaded as the stages require.
            prompt: a text, or its token ids.
            seed: of all that the stages draw; a generator continues from its present state.
            key: seed of what the stages draw as their key. Releases with one ``key`` pass under the same key; None
                draws a key for this release alone, with everything else.

        Returns:
            The observation, which an attack may see, and the truth, which it may not.

        Raises:
            InputError: no tokens, more than the model takes, or tokens outside the vocabulary.
        """
        random = seed if isinstance(seed, torch.Generator) else generator(seed, "release", 0)
        tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
        ((observation, truth),) = self.release_batch(model, [tokens], random, key)
        return observation, replace(truth, text=model.text(tokens))

    def release_batch(
        self,
        model: TruncatedModel,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        key: int | None = None,
    ) -> list[tuple[Observation, GroundTruth]]:
        """Release several prompts, packed in passes of up to ``model.max_pass_tokens`` tokens.

        Each prompt draws one seed from the generator and the rest from that seed, so what is drawn for a
        prompt depends on neither the packing nor the other prompts' lengths.

        Args:
            key: see ``release``; it is the key of all these prompts.

        Raises:
            InputError: a prompt has no tokens, more than the model takes, or tokens outside the vocabulary.
        """
        provider = self.provider_model(model)
        info = self._public(model, provider)
        released = []
        for pack in self._packs(model, provider, prompts, generator, key):
            requests = [Request(provider.prefix(), prompt.inputs) for prompt in pack]
            with quiet_bitsandbytes():
                answers = provider.run(requests, keep=False)

            def run(inputs: list[Tensor]) -> list[Tensor]:
                requests = [Request(provider.prefix(), own) for own in inputs]
                return [answer.states for answer in provider.run_all(requests, keep=False)]

            released += [
                self._finish(prompt, answer.states, info, provider, run)
                for prompt, answer in zip(pack, answers, strict=True)
            ]
        return released

    def release_layers(
        self,
        model: TruncatedModel,
        layers: Sequence[int],
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
    ) -> list[list[tuple[Observation, GroundTruth]]]:
        """Release several prompts at several layers from the same passes, a list for each layer.

        Each is what ``release_batch`` gives at that layer for the same state of the generator.

        Args:
            model: shows the states behind a layer, none of the ``layers`` is behind its own.

        Raises:
            InputError: see ``release_batch``.
        """
        provider = self.provider_model(model)
        info = self._public(model, provider)
        infos = [replace(info, site=Site(layer)) for layer in layers]
        released: list[list[tuple[Observation, GroundTruth]]] = [[] for _ in layers]
        for pack in self._packs(model, provider, prompts, generator):
            requests = [Request(provider.prefix(), prompt.inputs) for prompt in pack]
            with quiet_bitsandbytes():
                answers = provider.run_layers(requests, layers)
            for prompt, states in zip(pack, answers, strict=True):
                drawn = prompt.draws.get_state()
                for at, info, (layer, own) in zip(released, infos, states.items(), strict=True):

                    def run(inputs: list[Tensor], layer: int = layer) -> list[Tensor]:
                        asked = [Request(provider.prefix(), one) for one in inputs]
                        return [found[layer] for found in provider.run_layers(asked, [layer])]

                    prompt.draws.set_state(drawn)
                    at.append(self._finish(prompt, own, info, provider, run))
        return released

    def _packs(
        self,
        model: TruncatedModel,
        provider: TruncatedModel,
        prompts: Sequence[Sequence[int]],
        generator: torch.Generator,
        key: int | None = None,
    ) -> Iterator[list[_Prepared]]:
        """Yield prompts, checked and prepared, as many at once as one pass takes."""
        for tokens in prompts:
            _check_tokens(tokens, model)
        prepared = (self._prepare(provider, tokens, generator, key) for tokens in prompts)
        return packs(prepared, lambda prompt: len(prompt.inputs), provider.max_pass_tokens)

    def added(self, model: TruncatedModel, generator: torch.Generator) -> Float[Tensor, "p d"]:
        """Draw embeddings such as the channel puts before a prompt; empty where it puts none there."""
        inputs = self._prepare(model, [0], generator).inputs
        return inputs[:-1] if inputs.is_floating_point() else model.embed(inputs[:0])

    def _public(self, model: TruncatedModel, provider: TruncatedModel) -> ObservationInfo:
        info = ObservationInfo(
            model=model.ref.name,
            signature=provider.signature,
            site=model.site,
            provider_dtype=_name(provider.dtype),
            quantization=provider.quantization,
        )
        return self.published(info)

    def published(self, info: ObservationInfo) -> ObservationInfo:
        """Return public facts with what the channel publishes of itself, for rows that passed it elsewhere."""
        info = replace(info, channel=self.specs)
        for defense in self.defenses:
            info = defense.publish(info)
            if not isinstance(info, ObservationInfo):
                raise HiddenlabError(
                    f"the method 'publish' of the defense {defense.spec} returned no ObservationInfo; return info, or "
                    "replace(info, …)"
                )
        return info

    def _prepare(
        self,
        provider: TruncatedModel,
        tokens: Sequence[int],
        generator: torch.Generator,
        key: int | None = None,
    ) -> _Prepared:
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
        # The prompt's own generator lives on the CPU, so that a seed gives the same secret on every device.
        own = Draws.seeded(seed, key)
        computed = self._replaced(provider, tokens, own)
        inputs = self._inputs(provider, tokens if computed is None else computed, own)
        _check_length(len(tokens), len(inputs), provider)
        return _Prepared(tuple(tokens), computed, inputs, seed, own)

    def _inputs(self, provider: TruncatedModel, tokens: Sequence[int], own: Draws) -> Tensor:
        inputs = torch.tensor(list(tokens), device=provider.device)
        if self._changes_inputs:
            # Token ids are kept where no stage changes inputs: some architectures need more than the embedding.
            inputs, table = provider.embed(inputs), self._table(provider)
            for i, defense in enumerate(self.defenses):
                inputs = defense.inputs(inputs, table, own.for_stage(i, "inputs")).to(provider.dtype)
        return inputs

    def _returned(
        self, number: int, states: Tensor, prepared: _Prepared, provider: TruncatedModel, run: OfTexts
    ) -> Any:
        """Return what a stage makes of states; one that needs other texts gets theirs, which passed the same inputs."""
        defense, draws = self.defenses[number], prepared.draws.for_stage(number, "states")
        if not isinstance(defense, Mixing):
            return defense.states(states, draws)
        texts = defense.texts(provider, len(prepared.tokens), draws)
        with quiet_bitsandbytes():
            others = run([self._inputs(provider, text, draws) for text in texts]) if texts else []
        own = [other[len(other) - len(text) :] for other, text in zip(others, texts, strict=True)]
        return defense.mixed(states, own, draws.for_stage(number, "states"))

    def _replaced(
        self, provider: TruncatedModel, tokens: Sequence[int], draws: Draws
    ) -> tuple[int, ...] | None:
        """Return the tokens that the model runs in place of the prompt's; None where no stage replaces any."""
        for i, defense in enumerate(self.defenses):
            if isinstance(defense, Replacement):
                computed = defense.replaced(tokens, self.vocabulary(provider), draws.for_stage(i, "tokens"))
                if len(computed) != len(tokens):
                    raise HiddenlabError(
                        f"the defense {defense.spec} replaced {len(tokens)} tokens by {len(computed)}"
                    )
                _check_tokens(computed, provider)
                return tuple(computed)
        return None

    def vocabulary(self, model: TruncatedModel) -> Vocabulary:
        """Return the tokens of a model, as stages that replace tokens know them."""
        if model not in self._vocabularies:
            self._vocabularies[model] = Vocabulary(self._table(model), frozenset(model.special_ids))
        return self._vocabularies[model]

    def _table(self, provider: TruncatedModel) -> Tensor:
        """Return every token's embedding as the model's embedding module gives it (some modules scale it)."""
        probe = torch.arange(min(4, provider.vocab_size), device=provider.device)
        if torch.equal(provider.embed(probe), provider.embedding[probe]):
            return provider.embedding
        if provider not in self._tables:
            self._tables[provider] = provider.embed(torch.arange(provider.vocab_size))
        return self._tables[provider]

    def _finish(
        self,
        prepared: _Prepared,
        states: Float[Tensor, "m d"],
        info: ObservationInfo,
        provider: TruncatedModel,
        run: OfTexts,
    ) -> tuple[Observation, GroundTruth]:
        rows = len(prepared.tokens)
        if len(states) != rows + info.prefix_tokens:
            raise HiddenlabError(
                f"the channel {' | '.join(self.specs)} added {len(states) - rows} input rows, "
                f"but its public facts say {info.prefix_tokens}"
            )
        order: tuple[int, ...] | None = None
        details: dict[str, Any] = {"seed": prepared.seed}
        # A copy: the pass's buffer holds the states of the prefix and of other prompts too.
        states = states[len(states) - rows :].clone()
        for i, defense in enumerate(self.defenses):
            # A copy: a stage may work in place, and its rows are compared with those that it got.
            returned = self._returned(i, states.clone(), prepared, provider, run)
            if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[0], Tensor)):
                raise HiddenlabError(
                    f"the method 'states' of the defense {defense.spec} must return three things: the rows as a "
                    "tensor, their order or None, and a dictionary of secret details, {} if there are none"
                )
            before, (states, step, drawn) = states, returned
            check_release(defense, before, states, step)
            if step is not None:
                order = step if order is None else tuple(order[r] for r in step)
                drawn = {**drawn, "row_order": step}
            if drawn:
                details[_unused(defense.spec, details)] = drawn
        if len(states) < rows:
            # Who sees some rows of a prompt also knows its length and their positions.
            info = replace(info, positions=order, facts={**info.facts, "tokens": rows})
        truth = GroundTruth(prepared.tokens, order, details, computed=prepared.computed)
        return Observation(states.clone().contiguous(), info), truth

    def received(self, observation: Observation, truth: GroundTruth) -> Float[Tensor, "rows d"]:
        """Return released states as the rightful receiver gets them, who knows what the stages drew.

        Row orders are undone here, and each stage undoes what else it can (``Stage.undo``), the last one first.

        Raises:
            HiddenlabError: a stage's ``undo`` returned something else than a row for each token that is shown.
        """
        drawn, seen = list[tuple[Defense, dict[str, Any]]](), dict[str, Any]()
        for defense in self.defenses:
            own = truth.details.get(key := _unused(defense.spec, seen), {})
            seen |= {key: own} if own else {}
            drawn.append((defense, own))
        states = observation.states
        for defense, own in reversed(drawn):
            if not selects_rows(defense) and own.get("row_order") is not None:
                order = torch.tensor(own["row_order"])
                states = states[
                    order.argsort()[int((order < 0).sum()) :]
                ]  # rows that are no token's are dropped
            states = defense.undo(states, own) if isinstance(defense, Stage) else states
        rows = len(truth.tokens if observation.info.positions is None else observation.info.positions)
        if not isinstance(states, Tensor) or states.ndim != 2 or len(states) != rows:
            raise HiddenlabError(
                f"a method 'undo' of {' | '.join(self.specs)} returned something else than {count_of(rows, 'row')}"
            )
        return states

    def __repr__(self) -> str:
        stages = (
            "; ".join(repr(defense) for defense in self.defenses) or "identity: states released as they are"
        )
        return f"Channel({stages})"


def in_order(observation: Observation, truth: GroundTruth) -> Float[Tensor, "rows d"]:
    """Return the rows of one's own release in the prompt's order, without those of no token; mixtures as they are."""
    states = observation.states
    if truth.row_order is None or mixes_rows(observation.info):
        return states
    order = torch.tensor(truth.row_order, device=states.device)
    return states[order.argsort()[int((order < 0).sum()) :]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unused(spec: str, details: dict[str, Any]) -> str:
    """Return the key of a stage's secret details: its spec, numbered where the channel holds it more than once."""
    key, count = spec, 1
    while key in details:
        count += 1
        key = f"{spec}#{count}"
    return key


def _check_length(tokens: int, inputs: int, model: TruncatedModel) -> None:
    most, before = most_tokens(model.module), inputs - tokens
    if most is not None and inputs > most:
        beside = f" behind a prefix of {before}" * bool(before)
        raise InputError(
            f"the prompt has {count_of(tokens, 'token')}{beside}, and {model.ref.name} takes {most}; cut the prompt"
        )


def _check_tokens(tokens: Sequence[int], model: TruncatedModel) -> None:
    if not len(tokens):
        raise InputError("the prompt is empty; give at least one token")
    if bad := [token for token in tokens if not 0 <= token < model.vocab_size]:
        raise InputError(
            f"token {bad[0]} is outside the vocabulary of {model.ref.name} (0 to {model.vocab_size - 1})"
        )
