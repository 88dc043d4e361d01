"""Run the first l layers of a causal language model, with only those in memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hiddenlab.errors import InputError, NotApplicableError
from hiddenlab.models.attention import (
    EAGER,
    Attention,
    attending,
    register_attention,
    unchanged_rotary,
    use_attention,
)
from hiddenlab.models.checkpoint import decoder_layers, some_layers
from hiddenlab.models.choice import ENGINES, choose_engine
from hiddenlab.models.engine import _ACTIVE, ATTENTION_NAME, GivenPass, PackedPass, ShownError, announce
from hiddenlab.models.hooks import beginning_behind, capturing, holding
from hiddenlab.models.load import (
    ModelRef,
    checked_layer,
    load_config,
    load_module,
    load_tokenizer,
    parse_dtype,
    resolve_model,
    signature_of,
)
from hiddenlab.models.plain import run_plain
from hiddenlab.models.reading import foreign_layers
from hiddenlab.models.request import Answer, Prefix, Request, packs
from hiddenlab.models.tokens import known_ids, shown, token_ids
from hiddenlab.prompts import Prompt
from hiddenlab.types import INNER_STREAMS, LAST_STREAMS, Site

__all__ = [
    "Answer",
    "ModelRef",
    "Prefix",
    "Request",
    "TruncatedModel",
    "decoder_layers",
    "load_model",
    "signature_of",
]


class TruncatedModel:
    """The first l layers of a causal language model.

    Args:
        load_sibling: loads other parts of a model that is not on disk, see ``sibling``; None loads them by ``ref``.
        engine: ``packed`` runs many prompts in one pass through one attention function (see ``engine``); ``plain`` runs
            the model's own forward pass for each (see ``plain``).
        difference: where the packed engine was checked and is wrong: the comparison that failed.
        embeddings: the model gives the same states from input embeddings as from token ids.
        left_out: how many of its first layers are left out (``checkpoint.with_layers``); inputs are then the
            states behind these.

    Attributes:
        ref: which model. site: layer and stream of the states it returns. dtype, device: where it computes.
        evaluated_tokens, forward_calls: counters over the life of the truncated model; every position run counts.
        attention: how its last layer attends (scaling, window, cap), known once something ran.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        ref: ModelRef,
        site: Site,
        tokenizer: Any = None,
        quantization: str | None = None,
        load_sibling: Callable[..., "TruncatedModel"] | None = None,
        engine: str = "packed",
        difference: str = "",
        embeddings: bool = True,
        left_out: int = 0,
    ) -> None:
        self.module = module
        self.engine = engine
        self.difference = difference
        self.embeddings = embeddings
        self.left_out = left_out
        use_attention(module, ATTENTION_NAME if engine == "packed" else EAGER)
        self.ref = ref
        self._load_sibling = load_sibling
        self.site = site
        self.tokenizer = tokenizer
        self.quantization = quantization
        self.max_pass_tokens = 2048
        self.evaluated_tokens = 0
        self.forward_calls = 0
        self.attention: Attention | None = None
        self._captured: Tensor | None = None

    def _hooked(self, inputs: Mapping[str, Any]) -> ExitStack:
        """Return the hooks of one pass over these inputs."""
        stack = ExitStack()
        stack.enter_context(capturing(self.module, self.site, self._capture))
        stack.enter_context(beginning_behind(self.module, self.left_out, inputs.get("inputs_embeds")))
        return stack

    def _capture(self, states: Any) -> None:
        self._captured = states

    @property
    def embedding(self) -> Float[Tensor, "v d"]:
        """The input embedding table."""
        return self.module.get_input_embeddings().weight  # type: ignore[operator,no-any-return]

    @property
    def vocab_size(self) -> int:
        return int(self.embedding.shape[0])

    @cached_property
    def width(self) -> int:
        """The number of coordinates of a state."""
        if self.site.stream not in INNER_STREAMS:
            return int(self.module.config.hidden_size)  # type: ignore[union-attr,arg-type]
        counted = self.evaluated_tokens, self.forward_calls
        width = self.encode(torch.zeros(1, dtype=torch.long)).shape[1]
        self.evaluated_tokens, self.forward_calls = counted
        return width

    @cached_property
    def layer_weights(self) -> int:
        """The number of weights that every token is multiplied with: all but the embedding table."""
        return max(1, sum(p.numel() for p in self.module.parameters()) - self.embedding.numel())

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @cached_property
    def signature(self) -> tuple[float, ...]:
        """Values that distinguish the model's weights from others (see ``signature_of``)."""
        return signature_of(self.embedding)

    @property
    def special_ids(self) -> list[int]:
        """Special token ids, BOS first: the candidates tried first at the first position."""
        config, tokenizer = self.module.config, self.tokenizer
        ids = [getattr(config, "bos_token_id", None)]
        ids += [getattr(config, "eos_token_id", None)] if tokenizer is None else tokenizer.all_special_ids
        flat = [i for item in ids for i in (item if isinstance(item, list) else [item]) if i is not None]
        return list(dict.fromkeys(i for i in flat if 0 <= i < self.vocab_size))

    def tokenize(self, prompt: str | Prompt, max_tokens: int | None = None) -> list[int]:
        """Return token ids of a text with the tokenizer's own special tokens, cut to ``max_tokens``.

        Of a ``Prompt`` with messages or ids, these in the chat template, or the ids themselves.

        Raises:
            InputError: see ``hiddenlab.models.tokens.token_ids``.
        """
        return token_ids(self.tokenizer, prompt, self.ref.name, most=max_tokens, size=self.vocab_size)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; an id without a text is shown as ``<id 299>``."""
        if self.tokenizer is None:
            return " ".join(str(i) for i in ids)
        return shown(self.tokenizer, self.known_ids, ids)

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """The token ids that have a text; without a tokenizer none."""
        return frozenset() if self.tokenizer is None else known_ids(self.tokenizer)

    def embedded(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids that have an embedding: a tokenizer may know more tokens than its model."""
        if max(ids, default=0) < self.vocab_size:
            return list(ids)
        return [token for token in ids if token < self.vocab_size]

    def prefix(self, *, offset: int = 0) -> Prefix:
        """Return an empty prefix, with ``offset`` positions before its first token."""
        return Prefix(self, offset=offset)

    def run(
        self,
        requests: Sequence[Request],
        *,
        keep: bool = True,
        grad: bool = False,
        together: bool = False,
        show: str | None = None,
    ) -> list[Answer]:
        """Run several requests in one forward pass, packed on one token axis.

        On a GPU the last digits of an answer depend on what else is in the pass.

        Args:
            requests: token chains and leaves after their prefixes; all token ids, or all embeddings.
            keep: hold the new keys and values, so that answers can be kept as prefix.
            grad: record gradients (inputs given as embeddings).
            together: let short chains attend in one product, which is faster for many of them; the last digits of an
                answer then depend on the other requests.
            show: an inner stream of the last layer to return, in place of the model's own stream.
        """
        if not self.embeddings and any(request.inputs.is_floating_point() for request in requests):
            raise NotApplicableError(
                f"{self.ref.name} looks tokens up more than once, so that their embeddings alone do not give its states"
            )
        if self.engine == "plain":
            if show:
                raise NotApplicableError(self._packed_only(f"the stream {show}"))
            return run_plain(self, requests, grad=grad)
        stream = show or self.site.stream
        inner = (self.site.layer - 1, stream) if stream in INNER_STREAMS else None
        packed = PackedPass(requests, keep, inner, together)
        inputs = torch.cat([r.inputs for r in requests]).to(self.device)[None]
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        output = self._pass(packed, grad, **{name: inputs}, position_ids=packed.positions(self.device))
        self.attention = packed.attention
        states = packed.shown if packed.shown is not None else self._states(output)[0]
        answers = []
        for request, start in zip(requests, packed.starts, strict=False):
            middle, end = start + len(request.tokens), start + request.size
            answers.append(Answer(states[start:middle], states[middle:end], request, packed.kept, start))
        return answers

    def run_all(
        self,
        requests: Sequence[Request],
        *,
        keep: bool = True,
        together: bool = False,
        show: str | None = None,
    ) -> list[Answer]:
        """Run requests in as few passes as ``max_pass_tokens`` allows; a larger request goes alone. See ``run``."""
        passes = packs(requests, lambda request: request.size, self.max_pass_tokens)
        return [a for pack in passes for a in self.run(pack, keep=keep, together=together, show=show)]

    def run_layers(
        self, requests: Sequence[Request], layers: Sequence[int]
    ) -> list[dict[int, Float[Tensor, "t d"]]]:
        """Return the states of chains behind several layers, from the same passes, by the layer's number.

        Args:
            requests: without branches. layers: 1 is the first; at most this model's.
        """
        # The plain engine runs sequences of one length together, in its own order.
        packs = [requests] if self.engine == "packed" else [[request] for request in requests]
        states = []
        for pack in packs:
            with holding(self.module, layers) as held:
                self.run(pack, keep=False)
            sizes = [request.size for request in pack]
            parts = {layer: held[layer][0].split(sizes) for layer in layers}
            states += [{layer: parts[layer][i] for layer in layers} for i in range(len(pack))]
        return states

    def run_given(
        self,
        inputs: Float[Tensor, "t d"],
        attended: Float[Tensor, "t a"],
        positions: Int[Tensor, " t"] | None = None,
        *,
        grad: bool = False,
    ) -> Float[Tensor, "t e"]:
        """Return states of single positions whose attention output at the first layer is given.

        Args:
            inputs: embeddings. attended: the first layer's stream ``attn`` (see ``run``). positions: zeros where None;
                where a model only rotates queries and keys, states of the first layer do not depend on them.
            grad: record gradients.

        Raises:
            InputError: the model's states depend on the attention of another layer.
        """
        if not self.behind_one_attention:
            raise InputError(
                "attention can be given to models of one layer, or that show the second one's queries, keys or values; "
                f"not for {self.site}"
            )
        where = torch.zeros(len(inputs), dtype=torch.long) if positions is None else positions
        places = where.to(self.device)[None]
        given = GivenPass(attended, self.site.stream if self.site.stream in INNER_STREAMS else None)
        output = self._pass(given, grad, inputs_embeds=inputs[None], position_ids=places)
        return given.shown if given.shown is not None else self._states(output)[0]

    @property
    def behind_one_attention(self) -> bool:
        """Whether a state depends on no attention but the first layer's, which the packed engine can be given."""
        if self.engine == "plain":
            return False
        if self.site.stream in INNER_STREAMS:
            return self.site.layer == 2 and self.site.stream != "attn"
        return self.site.layer == 1

    def forward_plain(
        self, inputs: Int[Tensor, "b n"] | Float[Tensor, "b n d"], *, grad: bool = False
    ) -> Float[Tensor, "b n e"]:
        """Return states of several sequences of one length by the model's own forward pass.

        Masks and positions are the model's own. This is what the packed engine is checked against.

        Args:
            inputs: token ids, or input embeddings. grad: record gradients.
        """
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        mode = torch.set_grad_enabled(True) if grad else torch.inference_mode()
        given = {name: inputs.to(self.device)}
        with mode, self._hooked(given), attending(self.module, EAGER), unchanged_rotary(self.module):
            states = self._states(self.module(**given, use_cache=False))
        if states.shape[:2] != inputs.shape[:2]:
            raise foreign_layers(self.module, states)
        self.evaluated_tokens += inputs.shape[0] * inputs.shape[1]
        self.forward_calls += 1
        return states

    def _packed_only(self, what: str) -> str:
        """Return the message that something needs the packed engine."""
        if not self.difference:
            return f"{what} needs the packed engine; leave --engine out"
        return f"{what} needs the packed engine, which does not reproduce {self.ref.name} ({self.difference})"

    def _pass(self, how: PackedPass | GivenPass, grad: bool, **inputs: Tensor) -> Any:
        """Run the model with a pass' attention; return its output, None where the pass ended early."""
        announce()
        active, output = _ACTIVE.set(how), None
        try:
            mode = torch.set_grad_enabled(True) if grad else torch.inference_mode()
            with mode, self._hooked(inputs), suppress(ShownError):
                output = self.module(**inputs, use_cache=False)
        finally:
            _ACTIVE.reset(active)
        self.evaluated_tokens += inputs["position_ids"].shape[1]
        self.forward_calls += 1
        return output

    def _states(self, output: Any) -> Tensor:
        if self.site.stream == "logits":
            return output.logits  # type: ignore[no-any-return]
        if self.site.stream == "final_norm":
            if "last_hidden_state" not in output:
                raise InputError(
                    f"{type(self.module).__name__} does not give its states after the final norm"
                )
            return output.last_hidden_state  # type: ignore[no-any-return]
        states, self._captured = self._captured, None
        if states is None or states.ndim != 3:
            raise foreign_layers(self.module, states)
        return states

    def encode(self, tokens: Int[Tensor, " n"] | Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return states of a prompt (token ids, or input embeddings), in one plain prefill."""
        return self.run([Request(self.prefix(), tokens)], keep=False)[0].states

    def embed(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """Return input embeddings of tokens, as the model's own embedding module gives them."""
        with torch.inference_mode():
            return self.module.get_input_embeddings()(tokens.to(self.device))  # type: ignore[operator,no-any-return]

    @property
    def on_disk(self) -> bool:
        """Whether its other parts are loaded from files."""
        return self._load_sibling is None

    @property
    def divided(self) -> bool:
        """Whether its layers are placed on several devices."""
        return len(set((getattr(self.module, "hf_device_map", None) or {}).values())) > 1

    def shallower(self, layer: int) -> "TruncatedModel":
        """Return the model's first layers alone; they share its weights where nothing but transformers placed them.

        The packed engine that is right behind the last layer is right behind the others, on which the last one depends.

        Raises:
            InputError: there are not so many layers.
        """
        if not 1 <= layer <= self.site.layer:
            raise InputError(
                f"layer {layer} is out of range: {self.ref.name} has layers 1 to {self.site.layer}"
            )
        placed = getattr(self.module, "hf_device_map", None) is not None
        if placed or self.quantization or self.left_out or self.site.stream in LAST_STREAMS:
            dtype = str(self.dtype).removeprefix("torch.")
            return self.sibling(layer, stream=self.site.stream, dtype=dtype, quantization=self.quantization)
        return TruncatedModel(
            some_layers(self.module, 0, layer), ref=self.ref, site=Site(layer, self.site.stream),
            tokenizer=self.tokenizer, engine=self.engine, difference=self.difference, embeddings=self.embeddings,
            load_sibling=self._load_sibling,
        )  # fmt: skip

    def sibling(self, layer: int | None = None, **options: Any) -> "TruncatedModel":
        """Load another part of the same model, or another form of this one, to the same device or devices.

        Args:
            layer: as for ``load_model``; None means all. options: further options of ``load_model``.
        """
        if self._load_sibling is not None:
            return self._load_sibling(layer, **options)
        engine = "plain" if self.engine == "plain" else "auto"
        return load_truncated(
            self.ref, layer, device=str(self.device), device_map="auto" if self.divided else None,
            **{"engine": engine, **options},
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"TruncatedModel({self.ref.name}, {self.site}, {self.dtype}, {self.device}, "
            f"{self.engine} engine; weights are public)"
        )


def load_model(
    name: str = "builtin",
    layer: int | None = None,
    *,
    stream: str = "resid",
    dtype: str = "float32",
    device: str = "auto",
    quantization: str | None = None,
    device_map: str | None = None,
    revision: str | None = None,
    local_only: bool = False,
    engine: str = "auto",
    trust_remote_code: bool = False,
) -> TruncatedModel:
    """Load the first ``layer`` layers of a model.

    Args:
        name: ``builtin``, a model of ``make models``, a local directory (of a LoRA adapter too), a GGUF file, or a hub
            id.
        layer: 1 … number of layers; None means all. ``final_norm`` and ``logits`` need all; ``embed`` is layer 0.
        stream: which states ``run`` returns, one of ``STREAMS`` (see ``Site``).
        dtype: float32, bfloat16 or float16. device: ``auto``, ``cpu``, ``cuda`` …
        quantization: None, ``int8`` or ``nf4`` (bitsandbytes). device_map: accelerate's placement, e.g. ``auto``.
        local_only: never ask the hub; for names that come from files of others.
        trust_remote_code: run code that the checkpoint brings. It can do whatever you can.
        engine: ``packed`` is fast, ``plain`` runs the model's own forward pass; ``auto`` checks whether the packed one
            gives the same states, and else takes the plain one.

    Raises:
        InputError: unknown model, dtype, device or engine, an engine that is wrong for the model, a layer out of range,
            an encoder-only model, a checkpoint that lacks a tensor of these layers.
    """
    options: dict[str, Any] = {
        "stream": stream, "dtype": dtype, "device": device, "quantization": quantization, "device_map": device_map,
        "engine": engine,
    }  # fmt: skip
    ref = resolve_model(name, revision, local_only=local_only, trust_remote_code=trust_remote_code)
    return load_truncated(ref, layer, **options)


def load_truncated(
    ref: ModelRef,
    layer: int | None = None,
    *,
    stream: str = "resid",
    dtype: str = "float32",
    device: str = "auto",
    quantization: str | None = None,
    device_map: str | None = None,
    engine: str = "auto",
) -> TruncatedModel:
    """Load the first ``layer`` layers of a model that was found; see ``load_model``.

    Raises:
        InputError: see ``load_model``.
    """
    from hiddenlab.models.device import parse_device

    torch_dtype, torch_device = parse_dtype(dtype), parse_device(device)
    name, config = ref.name, load_config(ref)
    total = getattr(config, "num_hidden_layers", 0)
    layer = checked_layer(name, total, layer, stream)
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known are {', '.join(ENGINES)}")
    register_attention(ATTENTION_NAME, _ACTIVE, "run it through TruncatedModel.run, not by itself")
    module = load_module(
        ref, config, layers=max(1, layer), head=stream == "logits", dtype=torch_dtype, device=torch_device,
        quantization=quantization, device_map=device_map, final_norm=stream in LAST_STREAMS, attention=EAGER,
    )  # fmt: skip
    # Inner streams are read by the packed engine's own function: the check compares the states behind their layer.
    inner = stream in INNER_STREAMS
    checked = TruncatedModel(
        module, ref=ref, site=Site(layer, "resid" if inner else stream), quantization=quantization
    )
    choice = choose_engine(checked, config, engine)
    model = TruncatedModel(
        module, ref=ref, site=Site(layer, stream), tokenizer=load_tokenizer(ref), quantization=quantization,
        **choice,
    )  # fmt: skip
    if inner and model.engine == "plain":
        raise InputError(model._packed_only(f"the stream {stream}"))
    return model
