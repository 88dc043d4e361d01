"""Say what a defense is, build it from its spec, and check what it released."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hiddenlab import registry
from hiddenlab.errors import HiddenlabError, InputError
from hiddenlab.row_facts import NOISE
from hiddenlab.secret_maps import is_mapped, map_between
from hiddenlab.types import ObservationInfo, Site

LOAD_OPTIONS = ("dtype", "quantization")
REPLACED = "replaced_tokens"  # the fact that rows are of other tokens than the prompt's
# What a stage did to rows, by what its map is of.
MAPPED = {
    "columns": "turned the coordinates of all rows by one orthogonal map",
    "each-row": "turned the coordinates of each row by an orthogonal map of its own",
    "rows": "mixed rows",
}
SUPPOSED = "supposed_channel"  # the fact that an attacker supposes the channel, whose code he does not know


@runtime_checkable
class Defense(Protocol):
    """One stage of a channel. All randomness comes from the generator, so that a seed repeats a release.

    What is drawn from the generator is fresh in every release. What belongs to a key, which may serve several releases,
    is drawn from ``hiddenlab.utils.random.key_of(generator)``.

    ``spec`` is the text that builds the same defense again, e.g. ``gaussian:sigma=0.01``. A stage that shows only some
    of the rows has ``selects = True``; one that adds rows which are no token's has ``adds``, their number. One whose
    strength only the provider knows has ``supposed(strength)``, which returns the same stage with a strength that an
    attacker assumes. One that adds fresh noise has ``averaged(count)``, which returns the stage that the mean of so
    many releases seems to have passed. One that replaces tokens before the model runs is a ``Replacement``.
    """

    spec: str

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return load options of the provider's truncated model (``dtype``, ``quantization``), changed or as given."""
        ...

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        """Return the input embeddings, changed or as given; added rows come first and count as ``prefix_tokens``."""
        ...

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        """Return the released states, the order of rows where changed, and secret details.

        Released row r was row ``order[r]``. A stage that selects leaves rows out: the order then lists those that stay,
        ascending.
        """
        ...

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        """Return the public facts with those of this stage added."""
        ...


@runtime_checkable
class Mixing(Protocol):
    """A defense that adds rows, for which it needs the states of other texts."""

    def texts(self, model: Any, tokens: int, generator: torch.Generator) -> list[list[int]]:
        """Return the tokens of texts whose states ``mixed`` needs.

        Args:
            model: the provider's. tokens: of the prompt.
        """
        ...

    def mixed(
        self, states: Float[Tensor, "rows d"], others: list[Float[Tensor, "_ d"]], generator: torch.Generator
    ) -> tuple[Float[Tensor, "more d"], tuple[int, ...], dict[str, Any]]:
        """Return what ``states`` returns; the order has -1 for rows that are no token's."""
        ...


@runtime_checkable
class Replacement(Protocol):
    """What a defense also has that replaces the prompt's tokens by others, which the model then runs.

    It publishes that it does so with ``with_replacement``.
    """

    def replaced(
        self, tokens: Sequence[int], vocabulary: "Vocabulary", generator: torch.Generator
    ) -> list[int]:
        """Return as many token ids, in the same order."""
        ...

    def origins(self, shown: int, count: int, vocabulary: "Vocabulary") -> Int[Tensor, " c"]:
        """Return up to ``count`` ids that a shown token may stand for, the likeliest ones, itself where it may.

        Raises:
            NotApplicableError: without a key nothing is known of them.
        """
        ...

    def likelihood(
        self, shown: int, candidates: Int[Tensor, " c"], vocabulary: "Vocabulary"
    ) -> Float[Tensor, " c"]:
        """Return the log-probability that each candidate is replaced by the shown token, to whoever lacks the key."""
        ...


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The model's tokens, as a defense that replaces them knows them.

    Attributes:
        table: every token's input embedding. special: ids that stand for no text, such as the one that begins a prompt;
            they are neither replaced nor put in place of others.
    """

    table: Float[Tensor, "v d"]
    special: frozenset[int] = frozenset()

    @cached_property
    def squares(self) -> Float[Tensor, " v"]:
        """The squared length of every embedding."""
        return self.table.detach().float().square().sum(1)

    def distances(self, token: int, places: Int[Tensor, " o"] | None = None) -> Float[Tensor, " o"]:
        """Return distances of a token's embedding to those of others; its own is exactly 0.

        Args:
            places: the others' ids; None for all tokens.
        """
        table = self.table.detach()
        if places is None:
            squares = self.squares + self.squares[token] - 2 * (table @ table[token]).float()
            squares[token] = 0.0
            return squares.clamp(min=0).sqrt()
        places = places.to(table.device)
        # A product with the whole table is cheaper than a copy of half of it.
        few = len(places) < len(table) // 2
        products = table[places] @ table[token] if few else (table @ table[token])[places]
        squares = self.squares[places] + self.squares[token] - 2 * products.float()
        return squares.clamp(min=0).sqrt().masked_fill(places == token, 0.0)

    def ordinary(self) -> Int[Tensor, " o"]:
        """Return the ids of all tokens that are not special, ascending."""
        keep = torch.ones(len(self.table), dtype=torch.bool)
        keep[[token for token in self.special if token < len(keep)]] = False
        return keep.nonzero()[:, 0]


class Stage:
    """A defense that does nothing; built-ins override what they change and leave the rest.

    Attributes:
        exact: all that it does to rows is to order them, to put others beside them, or to send them through a map that
            its public facts name; so attacks find the model's own numbers behind it, without noise.
    """

    spec = "identity"
    selects = False
    adds = 0
    exact = False

    def __repr__(self) -> str:
        return self.spec

    def provider(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def inputs(
        self, embeddings: Float[Tensor, "n d"], table: Float[Tensor, "v d"], generator: torch.Generator
    ) -> Float[Tensor, "m d"]:
        return embeddings

    def states(
        self, states: Float[Tensor, "rows d"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows d"], tuple[int, ...] | None, dict[str, Any]]:
        return states, None, {}

    def undo(self, states: Float[Tensor, "more d"], details: dict[str, Any]) -> Float[Tensor, "rows d"]:
        """Return released states as one gets them who knows the secret details that ``states`` returned.

        It measures what a defense costs its rightful user; no attack calls it. Rows are in their first order already,
        without those that the order says are no token's.
        """
        return states

    def averaged(self, count: int) -> "Stage":
        """Return the stage that the mean of several releases of one text, under one key, seems to have passed.

        A stage that adds fresh noise returns a weaker one. Any other returns itself.
        """
        return self

    def publish(self, info: ObservationInfo) -> ObservationInfo:
        return info


def as_defense(built: Any) -> Defense:
    if not isinstance(built, Defense):
        parts = ("spec", "provider", "inputs", "states", "publish")
        lacking = ", ".join(part for part in parts if not hasattr(built, part))
        raise HiddenlabError(f"{type(built).__name__} is no defense: it lacks {lacking}")
    return built


def build_defense(spec: str) -> Defense:
    """Return the defense of a spec; one of a file is known by the name in its own spec, too."""
    built = registry.build("defenses", spec)
    if not registry.is_file(registry.parse_spec(spec)[0]):
        return as_defense(built)
    again = registry.build("defenses", (defense := with_known_name(built)).spec)
    if _settings(again) != _settings(
        defense
    ):  # the attacker builds it from its spec, and would attack another one
        raise InputError(
            f"{type(defense).__name__}: the attribute spec, {defense.spec!r}, builds another defense than {spec!r} "
            "does; put every parameter into it"
        )
    return defense


def _settings(defense: Defense) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    return {name: value for name, value in vars(defense).items() if isinstance(value, plain)}


def with_known_name(built: Any) -> Defense:
    """Return a defense whose spec builds it again, its class registered where the name is new.

    Raises:
        InputError: the spec is that of another class; whoever reads it would take the defense for that one.
    """
    if inspect.isclass(built):
        raise InputError(f"{built.__name__} is a class; give an object of it, {built.__name__}(…)")
    defense = as_defense(built)
    own = [item for item in type(defense).__mro__ if item not in (Stage, object)]
    if isinstance(defense, Stage) and not any("spec" in vars(item) for item in (defense, *own)):
        raise InputError(
            f"{type(defense).__name__} has no name: set its attribute spec, as in spec = 'mine:strength=2'"
        )
    name, _ = registry.parse_spec(defense.spec)
    known = registry.resolve("defenses", name) if name in registry.names("defenses") else None
    if known is not type(defense) and (known is None or inspect.isclass(known)):
        registry.register("defenses", name, type(defense))
    return defense


def is_own(defense: Defense) -> bool:
    """Return whether a stage is a user's own or a plugin's: nobody says when its code changes."""
    return not type(defense).__module__.startswith("hiddenlab.")


def overrides(defense: Defense, method: str) -> bool:
    return getattr(type(defense), method, None) is not getattr(Stage, method)


def load_options(defenses: Sequence[Defense], plain: dict[str, Any]) -> dict[str, Any]:
    """Return the load options of the provider's model behind all stages.

    Args:
        plain: of the attacker's model, one for each of ``LOAD_OPTIONS``.

    Raises:
        InputError: two stages set the same option. HiddenlabError: a stage sets one that does not exist.
    """
    options, setters = dict(plain), dict[str, str]()
    for defense in defenses:
        changed = options | defense.provider(dict(options))
        if unknown := sorted(set(changed) - set(LOAD_OPTIONS)):
            raise HiddenlabError(
                f"the defense {defense.spec} sets unknown load options: {', '.join(unknown)}"
            )
        for name in LOAD_OPTIONS:
            if changed[name] == options[name]:
                continue
            if name in setters:
                both = f"{setters[name]} and {defense.spec}"
                raise InputError(f"the defenses {both} both set the provider's {name}; give one")
            setters[name] = defense.spec
        options = changed
    return options


def changes_states(defense: Defense) -> bool:
    return overrides(defense, "states") or isinstance(defense, Mixing)


def selects_rows(defense: Defense) -> bool:
    return bool(getattr(defense, "selects", False))


def added_rows(defense: Defense) -> int:
    return int(getattr(defense, "adds", 0))


def has_unknown_strength(defense: Defense) -> bool:
    return hasattr(defense, "supposed")


def with_strength(defense: Defense, strength: float) -> Defense:
    """Return a stage of unknown strength with an assumed one; any other stage unchanged."""
    return as_defense(defense.supposed(strength)) if hasattr(defense, "supposed") else defense


def averaged(defense: Defense, count: int) -> Defense:
    """Return what the mean of so many releases passed in place of a stage; see ``Stage.averaged``."""
    return as_defense(defense.averaged(count)) if hasattr(defense, "averaged") else defense


def replaces_tokens(defense: object) -> bool:
    return isinstance(defense, Replacement)


def with_replacement(info: ObservationInfo) -> ObservationInfo:
    """Return public facts that say that tokens were replaced before the model ran."""
    return replace(info, facts={**info.facts, REPLACED: True})


def are_replaced(info: ObservationInfo) -> bool:
    """Return whether rows are of tokens that a defense put in place of the prompt's."""
    return bool(info.facts.get(REPLACED))


def with_supposed(info: ObservationInfo) -> ObservationInfo:
    """Return public facts whose channel is what an attacker supposes."""
    return replace(info, facts={**info.facts, SUPPOSED: True})


def is_supposed(info: ObservationInfo) -> bool:
    """Return whether an attacker only supposes the channel."""
    return bool(info.facts.get(SUPPOSED))


def permutes_rows(defense: Defense) -> bool:
    return defense.publish(ObservationInfo("", (), Site(1))).rows_permuted


def check_release(defense: Defense, before: Tensor, states: Tensor, order: tuple[int, ...] | None) -> None:
    """Check the rows and order of a stage: a plugin that loses rows would otherwise corrupt the scores silently."""
    rows, more = len(before), added_rows(defense)
    if not bool(states.isfinite().all()) and bool(before.isfinite().all()):
        raise HiddenlabError(f"the defense {defense.spec} released NaN or infinity")
    if selects_rows(defense):
        kept = () if order is None else order
        if states.ndim != 2 or len(states) != len(kept) or list(kept) != sorted(set(kept) & set(range(rows))):
            raise HiddenlabError(f"the defense {defense.spec} does not say which of {rows} rows it released")
        return
    if states.ndim != 2 or len(states) != rows + more:
        raise HiddenlabError(
            f"the defense {defense.spec} released {tuple(states.shape)}, not {rows + more} rows"
        )
    if order is not None and sorted(order) != [-1] * more + list(range(rows)):
        raise HiddenlabError(
            f"the defense {defense.spec} reports a row order that is no permutation of {rows} rows"
        )
    untold = ObservationInfo("", (), Site(1))
    told = defense.publish(untold)
    if states.shape[1] != before.shape[1] and told == untold:
        raise HiddenlabError(
            f"the defense {defense.spec} released rows of {states.shape[1]} numbers in place of {before.shape[1]}, and "
            "its method 'publish' says nothing of it"
        )
    # Attacks would take each row for another token's, and the defense would look as if it held.
    if told.rows_permuted or told.columns_permuted or is_mapped(told):
        return
    if is_shuffled(before, states, order):
        raise HiddenlabError(
            f"the defense {defense.spec} shuffled rows or coordinates, and its method 'publish' says nothing of it: "
            "set rows_permuted or columns_permuted"
        )
    # Strong noise of a row's length looks like a map of its own.
    of = map_between(before, states.to(before.device)) if is_own(defense) else None
    if of is not None and not (of == "each-row" and NOISE in told.facts):
        raise HiddenlabError(
            f"the defense {defense.spec} {MAPPED[of]}, and its method 'publish' says nothing of it: let it return "
            f"hiddenlab.secret_maps.with_map(info, {of!r})"
        )


def is_shuffled(before: Tensor, states: Tensor, order: tuple[int, ...] | None) -> bool:
    """Return whether released rows are those that a stage was given in another order, or with coordinates in another.

    Args:
        order: as the stage reports it.
    """
    told = [row for row in order or () if row >= 0]
    if told != sorted(told):
        return True
    if states.shape != before.shape or torch.equal(states, before.to(states)):
        return False
    return torch.equal(states.flatten().sort().values, before.to(states).flatten().sort().values)
