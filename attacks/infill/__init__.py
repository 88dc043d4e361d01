"""Predict the tokens that a node of a token-sharded scheme does not hold, with a trained model (paper, section 7.2)."""

import time
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from hiddenlab.attacks.infill.masks import Shards
from hiddenlab.attacks.infill.model import Infiller
from hiddenlab.attacks.infill.text import OWN
from hiddenlab.attacks.infill.train import PRESETS, State, read_tokens, train_infiller
from hiddenlab.base import Attack
from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models import TruncatedModel
from hiddenlab.observation import parts_of_attention
from hiddenlab.preparations import as_whole
from hiddenlab.projections import projection_of
from hiddenlab.proposals.store import probe_for
from hiddenlab.types import AttackResult, Observation, ObservationInfo, TokenPrediction


class Infill(Attack):
    """Recover every token of a prompt from the rows that one node holds, with a model trained for it.

    The tokens of the held rows are predicted by a probe (read exactly, at layer 0). The others are predicted by a
    bidirectional, LoRA-tuned copy of the model, or by a masked language model (``attacks/infill/model.py``). With every
    row shown it is the trained transformer inverter of the literature (Wan et al., Morris et al.) and predicts every
    token again. The attacker knows the plan (the paper's worst case) and trains on its own texts, masked like it.

    Knows: the weights, the held rows, their positions, the prompt's length, the plan. Does not know: tokens, other
    rows.

    Args:
        preset: ``small`` (a laptop), ``medium`` or ``paper``. plan: ``own`` trains a model for the observation's plan,
            ``any`` one for all common plans of the layer.
        masked: a masked language model to tune in place of the attacked one: a directory or hub id.
        text: training text, in place of the preset's: ``own`` (the model's own samples) or a source of prompts.
        steps: of training at most, in place of the preset's; 0 takes a masked language model as it is.
        rounds: forward passes, each of which fixes the most certain tokens; the paper has one.
    """

    use_when = "more rows are missing than a search can fill, and half an hour of training is acceptable"

    def __init__(
        self,
        preset: Literal["small", "medium", "paper"] = "small",
        plan: Literal["own", "any"] = "own",
        masked: str | None = None,
        text: str | None = None,
        steps: int | None = None,
        rounds: int = 1,
    ) -> None:
        if rounds < 1 or (steps is not None and steps < 0):
            raise InputError(f"rounds must be at least 1 and steps at least 0, not {rounds} and {steps}")
        if steps == 0 and masked is None:
            raise InputError(
                "steps=0 takes a masked language model as it is; name one (masked=NAME), or train the attacked model"
            )
        recipe = PRESETS[preset]
        recipe = recipe if text is None else replace(recipe, text=text)
        self.recipe = recipe if steps is None else replace(recipe, steps=steps)
        self.plan, self.masked, self.rounds = plan, masked, rounds
        self._trained: tuple[tuple[TruncatedModel, ObservationInfo, Shards], Infiller, State] | None = None

    def _forget(self) -> None:
        self._trained = None

    def _fit(self, info: ObservationInfo) -> dict[str, float | str]:
        """Train the model, or load it from the cache.

        Returns:
            ``training_seconds`` (over all sessions, including the infiller of tokens that it started from),
                ``training_steps`` (its own), ``held_out_loss``, in nats a token, and ``training_text``.
        """
        _, state = self._infiller(info)
        return {
            "training_seconds": state.seconds,
            "training_steps": float(state.step),
            "held_out_loss": state.best,
            "training_text": "sampled from the model itself" if self.recipe.text == OWN else self.recipe.text,
        }

    def _infiller(self, info: ObservationInfo) -> tuple[Infiller, State]:
        if info.rows_permuted or info.columns_permuted is not None:
            raise NotApplicableError("the infiller needs rows and coordinates in order")
        if projection_of(info) is not None or parts_of_attention(info):
            raise NotApplicableError("the infiller needs whole states")
        shards = Shards.of(info)
        if self.plan == "any" and not shards.whole:
            shards = Shards()
        key = self.model, as_whole(info), shards
        if self._trained is None or self._trained[0] != key:
            infiller, state = train_infiller(
                *key, replace(self.recipe, seed=self.seed), self.progress, self.masked
            )
            self._trained = key, infiller, state
        return self._trained[1:]

    def _recover(self, observation: Observation) -> AttackResult:
        """Recover one prompt: held tokens as the probe reads them, the others as the model predicts them, unverified.

        Raises:
            NotApplicableError: rows or coordinates in unknown order.
        """
        infiller, _ = self._infiller(observation.info)
        started, info, model = time.perf_counter(), observation.info, self.model
        count = int(info.facts.get("tokens", 1 + max(info.positions or (len(observation.states) - 1,))))
        positions = list(info.positions or range(count))
        rows = observation.states.to(model.device).float()
        with torch.inference_mode():
            tokens = torch.zeros(1, count, dtype=torch.long, device=model.device)
            known = torch.zeros(1, count, dtype=torch.bool, device=model.device)
            states = torch.zeros(1, count, rows.shape[1], device=model.device)
            tokens[0, positions], known[0, positions] = self._read(rows, info, model), True
            states[0, positions] = rows
            certain = self._fill(infiller, tokens, known, states if infiller.reads_states else None)
        row_of = {position: row for row, position in enumerate(positions)}
        predictions = tuple(
            TokenPrediction(int(token), row_of.get(i, -1), 1 - float(certain[i]), None, 0, False)
            for i, token in enumerate(tokens[0])
        )
        return AttackResult(predictions, 0, 0, time.perf_counter() - started, "complete")

    def _read(
        self, rows: Float[Tensor, "rows d"], info: ObservationInfo, model: TruncatedModel
    ) -> Int[Tensor, " rows"]:
        """Return the tokens of the held rows."""
        if model.site.stream != "embed":
            return read_tokens(probe_for(model, as_whole(info), self.progress)[0], rows[None])[0]
        table = model.embed(torch.arange(model.vocab_size, device=model.device)).float()
        return (normalize(rows, dim=1) @ normalize(table, dim=1).T).argmax(1)

    def _fill(
        self,
        infiller: Infiller,
        tokens: Int[Tensor, "1 n"],
        known: Bool[Tensor, "1 n"],
        states: Float[Tensor, "1 n d"] | None,
    ) -> Float[Tensor, " n"]:
        """Fill in the missing tokens in place; return each predicted token's probability, 1 for those that were held.

        Where every row is shown, all tokens are predicted again.
        """
        if bool(known.all()):
            chances, best = infiller(tokens, known, states, known).softmax(-1).max(-1)
            tokens[0] = best
            return chances  # type: ignore[no-any-return]
        certain = torch.ones(tokens.shape[1], device=tokens.device)
        total = int((~known).sum())
        for left in range(self.rounds, 0, -1):
            wanted = ~known
            if not bool(wanted.any()):
                break
            chances, best = infiller(tokens, known, states, wanted).softmax(-1).max(-1)
            places = wanted[0].nonzero()[:, 0]
            take = len(places) if left == 1 else -(-total // self.rounds)
            chosen = chances.topk(min(take, len(places))).indices
            tokens[0, places[chosen]], certain[places[chosen]] = best[chosen], chances[chosen]
            known[0, places[chosen]] = True
        return certain

    def __repr__(self) -> str:
        return "Infill: knows the weights, one node's rows, the plan and texts of its own; not the other rows or tokens"
