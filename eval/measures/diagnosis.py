"""Plant faults that files of hidden states have, and measure whether the diagnosis names them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hiddenlab.attacks.vocab_match import VocabMatch
from hiddenlab.diagnosis import diagnose
from hiddenlab.diagnosis.places import Place, read_places
from hiddenlab.eval.cells import Figures
from hiddenlab.eval.measures.attack import exactly
from hiddenlab.models import TruncatedModel, load_model
from hiddenlab.prompts import load_prompts
from hiddenlab.types import Observation, Progress, silent
from hiddenlab.utils.random import generator

TINY = "tiny"  # a random model of two million weights, made on the spot
TOKENS, CACHED, PADDED = 24, 8, 3  # of the prompt; of its cached prefix; rows of padding
TUNED = 0.05  # a fine-tuned model's change of each matrix, relative to its norm, in rank 8
BUDGET = 64  # candidates a token where the attack runs on the built-in model


@dataclass(frozen=True)
class Planted:
    """Rows with a fault: what they claim to be, what the diagnosis should say, and the tokens that they show."""

    states: Float[Tensor, "rows w"]
    stream: str
    layer: int
    faults: tuple[str | None, ...]
    tokens: tuple[int | None, ...]


class _Source:
    """The states of a prompt at every place of a whole model."""

    def __init__(self, model: TruncatedModel, tokens: list[int], layer: int) -> None:
        self.model, self.tokens, self.layer = model, tokens, layer
        self.places = self._places(model, tokens)

    @staticmethod
    def _places(model: TruncatedModel, tokens: list[int]) -> dict[str, Tensor]:
        states = dict[str, Tensor]()

        def visit(place: Place, vectors: Tensor) -> None:
            states.setdefault(str(place.site) if place.site else place.name, vectors[0].float().clone())

        read_places(model, torch.tensor([tokens]), visit)
        return states

    def at(self, stream: str, layer: int) -> Tensor:
        return self.places[f"{stream} at layer {layer}"]

    def named(self, end: str) -> Tensor:
        """Return the output of the module of the claimed layer whose name ends so."""
        (name,) = (n for n in self.places if n.startswith("the output of") and n.endswith(end))
        return self.places[name]


def _faults(source: _Source) -> dict[str, Callable[[], Planted]]:
    """Return every fault by name, made on demand."""
    model, tokens, layer = source.model, source.tokens, source.layer
    config: Any = model.module.config
    last, heads = config.num_hidden_layers, config.num_key_value_heads
    shown = tuple(tokens)

    def plain(
        states: Tensor,
        *faults: str | None,
        stream: str = "resid",
        at: int = layer,
        of: tuple[int | None, ...] = shown,
    ) -> Planted:
        return Planted(states, stream, at, faults, of)

    def keys() -> Tensor:
        return source.at("k", layer).unflatten(1, (heads, -1))

    return {
        "none": lambda: plain(source.at("resid", layer), None),
        "one layer deeper": lambda: plain(source.at("resid", layer + 1), "place"),
        "one layer shallower": lambda: plain(source.at("resid", layer - 1), "place"),
        "after the final norm": lambda: plain(source.at("final_norm", last), "place", at=last),
        "before the final norm": lambda: plain(source.at("resid", last), "place", at=last, stream="final_norm"),
        "after the next layer's norm": lambda: plain(source.named(f"layers.{layer}.input_layernorm"), "place"),
        "MLP output without residual": lambda: plain(source.named(f"layers.{layer - 1}.mlp"), "place"),
        "first row missing": lambda: plain(source.at("resid", layer)[1:], "missing", of=shown[1:]),
        "first row (BOS) missing": lambda: plain(_behind_bos(source).at("resid", layer)[1:], "missing"),
        "extra BOS": lambda: plain(_behind_bos(source).at("resid", layer), None, of=(model.special_ids[0], *shown)),
        "left padding": lambda: plain(_padded(source), "padding", of=(*[None] * PADDED, *shown)),
        "cached prefix": lambda: plain(source.at("resid", layer)[CACHED:], "missing", of=shown[CACHED:]),
        "coordinates before heads": lambda: plain(keys().transpose(1, 2).flatten(1), "layout", stream="k"),
        "heads before tokens": lambda: plain(keys().transpose(0, 1).reshape(len(tokens), -1), "layout", stream="k"),
        "transposed square": lambda: _square(source),
        "K named V": lambda: plain(source.at("k", layer), "place", stream="v"),
        "provider in bfloat16": lambda: plain(_other(source, dtype="bfloat16").at("resid", layer), "numbers"),
        "provider in int8": lambda: plain(_other(source, quantization="int8").at("resid", layer), "numbers", "weights"),
        "fine-tuned": lambda: plain(_tuned(source).at("resid", layer), "weights"),
        "two prompts in one": lambda: _two(source),
    }  # fmt: skip


FAULTS = (
    "none", "one layer deeper", "one layer shallower", "after the final norm", "before the final norm",
    "after the next layer's norm", "MLP output without residual", "first row missing", "first row (BOS) missing",
    "extra BOS", "left padding", "cached prefix", "coordinates before heads", "heads before tokens",
    "transposed square", "K named V", "provider in bfloat16", "provider in int8", "fine-tuned", "two prompts in one",
)  # fmt: skip


def planted(spec: dict[str, object], folder: Path, progress: Progress = silent) -> Figures:
    """Plant one fault and ask what the rows are; also attack them as what they claim to be.

    ``named`` is 1 where the diagnosis names the fault, ``wrong`` the number of wrong tokens that the attack marks as
    verified.

    Args:
        spec: model, layer, fault, prompt (its index), seed.

    Raises:
        NotApplicableError: the fault needs what the model lacks.
    """
    with _model_of(str(spec["model"])) as (name, tiny):
        whole = load_model(name, engine="plain", device="cpu")
        layer, seed = int(str(spec["layer"])), int(str(spec["seed"]))
        tokens = _prompt(whole, int(str(spec["prompt"])), seed, tiny)
        plant = _faults(_Source(whole, tokens, layer))[str(spec["fault"])]()
        model = load_model(name, plant.layer, stream=plant.stream, device="cpu")
        observation = Observation.from_states(plant.states, model)
        told = diagnose(observation, model, seed=seed, progress=progress)
        options = {"proposal": "vocab"} if tiny else {"proposal": "lm", "budget": BUDGET}
        result = VocabMatch(**options).fit(observation.info, model, seed).recover(observation)
        wrong = sum(t.verified and t.token != plant.tokens[t.row] for t in result.tokens)
    return {
        "named": exactly(float(told.fault in plant.faults), 1),
        "wrong": exactly(float(wrong), 1),
    }


def _behind_bos(source: _Source) -> _Source:
    return _Source(source.model, [source.model.special_ids[0], *source.tokens], source.layer)


@torch.inference_mode()
def _padded(source: _Source) -> Tensor:
    """Return the states of a prompt in a batch that is padded on the left, padding included."""
    ids = torch.tensor([[source.model.special_ids[0]] * PADDED + source.tokens])
    mask = torch.ones_like(ids)
    mask[:, :PADDED] = 0
    output = source.model.module(
        input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
    )
    return output.hidden_states[source.layer][0].clone()  # type: ignore[no-any-return]


def _square(source: _Source) -> Planted:
    """Return the states of a prompt of as many tokens as a state has coordinates, transposed."""
    width = source.model.width
    tokens = (source.tokens * (1 + width // len(source.tokens)))[:width]
    states = source.model.sibling(source.layer, engine="plain").encode(torch.tensor(tokens)).T.clone()
    return Planted(states, "resid", source.layer, ("layout",), tuple(tokens))


def _two(source: _Source) -> Planted:
    half = len(source.tokens) // 2
    parts = [
        _Source(source.model, part, source.layer) for part in (source.tokens[:half], source.tokens[half:])
    ]
    states = torch.cat([part.at("resid", source.layer) for part in parts])
    return Planted(states, "resid", source.layer, ("several",), tuple(source.tokens))


def _other(source: _Source, **form: str) -> _Source:
    """Return the prompt's states in another form of the model."""
    return _Source(source.model.sibling(None, engine="plain", **form), source.tokens, source.layer)


@torch.no_grad()
def _tuned(source: _Source) -> _Source:
    """Return the prompt's states in a model whose matrices were changed in a few directions, as fine-tuning does."""
    model = source.model.sibling(None, engine="plain")
    draws = generator(0, "fine-tuned")
    for name, weight in model.module.named_parameters():
        if weight.ndim == 2 and ".layers." in f".{name}":
            change = torch.randn(len(weight), 8, generator=draws) @ torch.randn(
                8, weight.shape[1], generator=draws
            )
            weight.add_(change, alpha=float(TUNED * weight.norm() / change.norm()))
    return _Source(model, source.tokens, source.layer)


def _prompt(model: TruncatedModel, index: int, seed: int, tiny: bool) -> list[int]:
    if tiny:
        tokens = torch.randint(3, model.vocab_size, (TOKENS,), generator=generator(seed, "prompt", index))
        return [int(token) for token in tokens]
    return model.tokenize(load_prompts("builtin")[index].text, TOKENS)


@contextmanager
def _model_of(name: str) -> Iterator[tuple[str, bool]]:
    """Yield a model's name; ``tiny`` is built in a folder of its own."""
    if name != TINY:
        yield name, False
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    with TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config: Any = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=500, initializer_range=0.15, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        yield folder, True
