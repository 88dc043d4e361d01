"""Define the base class of every attack, built-in or plugin."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import check_info, check_observation
from hiddenlab.row_facts import extra_rows
from hiddenlab.scoring import pieces_of
from hiddenlab.secret_maps import is_mapped
from hiddenlab.types import AttackResult, Observation, ObservationInfo, Progress, silent

Fitted = TypeVar("Fitted", bound="Attack")


class Attack:
    """Recover tokens from observations; an attack sees observations and the public model, never a ground truth.

    ``fit`` comes first: it gives the attack its model and seed, and prepares what one channel needs. Then ``recover``
    and ``recover_batch`` may be called as often as there are observations of that channel. An attack of one's own
    defines ``_recover``, or ``_recover_batch`` where several prompts at once are faster, and ``_fit`` where it
    prepares anything. What ``_fit`` keeps for the next call depends on model and seed: ``_forget`` drops it.

    Attributes:
        batch: how many observations are worth taking at once; the runner records so many prompts together.
        seed: of everything that the attack draws, as given to ``fit``.
        learns: what it verifies may help it with later prompts, in this run and in others. False where the same prompts
            are attacked several times and compared, or by several processes: none may profit from another.
        any_width: the attack reads rows of any width and checks them itself: fingerprints, parts of states. Others get
            rows as wide as the model's states alone.
        secret_maps: the attack reads rows behind a secret linear map; others would take them for states.
        extra_rows: the attack reads observations of which some rows are no token's; others would name a token for each.
        parts: names of the parts that an option ``without`` can leave out, to measure what each brings.
        use_when: what follows "Use it when" in ``hiddenlab list attacks``, without a full stop at the end.
        measured: what preparation measured, by name (seconds of training, epsilon, weights); part of a run's record.
    """

    batch: int = 1
    any_width: bool = False
    secret_maps: bool = False
    extra_rows: bool = False
    parts: tuple[str, ...] = ()
    use_when: str = ""
    seed: int = 0
    learns: bool = True
    measured: Mapping[str, float | str] = MappingProxyType({})
    _model: TruncatedModel | None = None
    _progress: Progress = staticmethod(silent)

    @property
    def progress(self) -> Progress:
        """Where progress is reported: what is done, how much of it, and of how much.

        Parts of an attack may keep it: it reports to what is set last.
        """
        return self._report

    @progress.setter
    def progress(self, progress: Progress) -> None:
        if progress != self._report:
            self._progress = progress

    def _report(self, what: str, done: int, total: int) -> None:
        self._progress(what, done, total)

    def fit(self: Fitted, info: ObservationInfo, model: TruncatedModel, seed: int = 0) -> Fitted:
        """Prepare for observations of one channel.

        Args:
            info: the public facts of the observations to come.
            model: the attacker's own truncated model, of the same weights and site.
            seed: of everything that the attack draws.

        Returns:
            The attack itself.

        Raises:
            InputError: the facts are of another model or site.
            NotApplicableError: no observation with these facts can be attacked.
        """
        check_info(info, model)
        if is_mapped(info) and not self.secret_maps:
            raise NotApplicableError(
                f"{type(self).__name__} does not read rows behind a secret linear map; vocab-match does"
            )
        if extra_rows(info) and not self.extra_rows:
            raise NotApplicableError(
                f"{type(self).__name__} does not read rows among which some are no token's; vocab-match does"
            )
        if model is not self._model or seed != self.seed:
            self._forget()
        self._model, self.seed = model, seed
        self.measured = self._fit(info)
        return self

    def left_out(self, without: str) -> frozenset[str]:
        """Return the names of the parts in ``without``, which are joined by ``+``.

        Raises:
            InputError: the attack has no such part.
        """
        names = frozenset(name for name in without.split("+") if name)
        if unknown := sorted(names.difference(self.parts)):
            raise InputError(
                f"no part {unknown[0]!r} can be left out; those that can are {', '.join(self.parts)}"
            )
        return names

    def expect(self, info: ObservationInfo, models: Sequence[TruncatedModel]) -> None:
        """Prepare at once what several layers of one model need; by default nothing.

        Args:
            info: the public facts at the last layer; those at the others differ by the site.
            models: of growing depth.
        """
        return

    def reset(self) -> None:
        """Return to the state behind ``fit``: forget what earlier prompts changed, and keep what is only loaded.

        The runner calls it before each batch of an independent run, where ``learns`` is False. The answers to a batch
        then depend on that batch alone. An attack that keeps anything from one prompt for the next defines it; by
        default there is nothing to forget.
        """
        return

    def recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt.

        Raises:
            InputError: the observation does not fit the model, or ``fit`` was not called.
            NotApplicableError: the attack needs something that this observation lacks.
        """
        return self.recover_batch([observation])[0]

    def recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        """Recover several prompts; the answers are those of ``recover``, up to rounding.

        Raises:
            InputError, NotApplicableError: see ``recover``; one such observation is enough.
        """
        for observation in observations:
            check_observation(observation, self.model, any_width=self.any_width)
        results = self._recover_batch(observations)
        for result in results:
            for token in result.tokens:
                if type(token.token) is not int or not 0 <= token.token < self.model.vocab_size:
                    raise InputError(
                        f"{type(self).__name__} returned the token {token.token!r}; the model's are whole numbers "
                        f"from 0 to {self.model.vocab_size - 1}"
                    )
                if type(token.row) is not int or token.row < -1:
                    raise InputError(
                        f"{type(self).__name__} returned a token of row {token.row!r}; rows are whole numbers from 0, "
                        "and -1 is a token without one"
                    )
        return [
            replace(result, text=self.model.text(result.ids), pieces=tuple(pieces_of(self.model, result)))
            for result in results
        ]

    @property
    def model(self) -> TruncatedModel:
        """The model that ``fit`` was given.

        Raises:
            InputError: ``fit`` was not called.
        """
        if self._model is None:
            name = type(self).__name__
            raise InputError(f"{name} has no model yet; call fit(observation.info, model) first")
        return self._model

    def _forget(self) -> None:
        """Drop everything that was prepared with another model or seed."""

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Prepare for a channel; return the measurements by name."""
        return {}

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt that fits the model."""
        return self._recover_batch([observation])[0]

    def _recover_batch(self, observations: Sequence[Observation]) -> list[AttackResult]:
        """Recover prompts that fit the model."""
        return [self._recover(observation) for observation in observations]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls._recover is Attack._recover and cls._recover_batch is Attack._recover_batch:
            raise TypeError(f"the attack {cls.__name__} defines neither _recover nor _recover_batch")
