"""Strict readers that share nothing with hiddenlab's: what a file may say, written down a second time and plainly.

Each takes a file's bytes and gives its content as JSON values, or raises ``Refused``. They are slow and short.
"""

import json
import math
import re
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

STREAMS = {"resid", "embed", "q", "k", "v", "kv", "qkv", "attn", "final_norm", "logits"}
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
Rule = Callable[[Any], bool]


class Refused(Exception):
    """The file is not what it should be."""


class Either(Refused):
    """The file may be refused; if it is not, its content has to be this one."""

    def __init__(self, content: Any) -> None:
        super().__init__()
        self.content = content


def need(condition: object) -> None:
    """Refuse unless a condition holds."""
    if not condition:
        raise Refused


def value_of(data: bytes) -> Any:
    """One JSON value: UTF-8, no name twice, no number beyond 64 bits or float64, at most 200 levels."""

    def names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len({name for name, _ in pairs}) == len(pairs))
        return dict(pairs)

    def refuse(_: str) -> Any:
        raise Refused

    try:
        value = json.loads(data.decode(), object_pairs_hook=names, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused from None
    level, depth = [value], 0
    while level:
        depth += 1
        deeper = []
        for one in level:
            if isinstance(one, str):
                need(not re.search("[\ud800-\udfff]", one))
            elif isinstance(one, float):
                need(math.isfinite(one))
            elif isinstance(one, int):
                need(-(2**63) <= one < 2**64)
            elif isinstance(one, dict):
                need(not any(re.search("[\ud800-\udfff]", name) for name in one))
                deeper += one.values()
            elif isinstance(one, list):
                deeper += one
        level = deeper
    need(depth <= 201)
    return value


# ---- rules


def text(x: Any) -> bool:
    return isinstance(x, str)


def flag(x: Any) -> bool:
    return isinstance(x, bool)


def whole(low: int = 0, high: int = 2**31 - 1) -> Rule:
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and low <= x <= high


def number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def share(x: Any) -> bool:
    return number(x) and 0 <= x <= 1


def amount(x: Any) -> bool:
    return number(x) and x >= 0


def maybe(rule: Rule) -> Rule:
    return lambda x: x is None or rule(x)


def each(rule: Rule) -> Rule:
    return lambda x: isinstance(x, list) and all(map(rule, x))


def table_of(rule: Rule) -> Rule:
    return lambda x: isinstance(x, dict) and all(map(rule, x.values()))


def among(*values: Any) -> Rule:
    return lambda x: any(x == one and type(x) is type(one) for one in values)


def anything(_: Any) -> bool:
    return True


def fields(needed: dict[str, Rule], optional: dict[str, Rule] | None = None) -> Rule:
    """An object with these fields and no others."""
    rules = needed | (optional or {})
    return lambda x: (
        isinstance(x, dict)
        and set(needed) <= set(x) <= set(rules)
        and all(rules[name](one) for name, one in x.items())
    )


# ---- files

_PUBLIC = fields(
    {
        "model": text,
        "signature": each(number),
        "site": fields({"layer": whole(0, 65536)}, {"stream": lambda x: text(x) and x in STREAMS}),
    },
    {
        "channel": each(text),
        "rows_permuted": flag,
        "columns_permuted": among(None, "per-row", "shared"),
        "noise_sigma": maybe(lambda x: number(x) and x > 0),
        "prefix_tokens": whole(0, 4096),
        "provider_dtype": among("float32", "bfloat16", "float16"),
        "quantization": among(None, "int8", "nf4"),
        "positions": maybe(
            lambda x: each(whole(0, 2**20 - 1))(x) and x != [] and all(a < b for a, b in pairwise(x))
        ),
        "facts": lambda x: isinstance(x, dict),
    },
)


def observation(data: bytes) -> Any:
    """Public facts, and the bytes of the states with their shapes."""
    tensors, metadata = safetensors(data)
    need("hiddenlab" in metadata)
    said = value_of(metadata["hiddenlab"].encode(errors="surrogatepass"))
    need(fields({"format": among(1), "observations": each(_PUBLIC)})(said) and said["observations"])
    need(set(tensors) == {f"states.{i}" for i in range(len(said["observations"]))})
    out = []
    for i, info in enumerate(said["observations"]):
        dtype, shape, raw = tensors[f"states.{i}"]
        need(dtype in SIZES and len(shape) == 2 and shape[0] > 0)
        positions = info.get("positions")
        need(positions is None or len(positions) == shape[0])
        need(all(math.isfinite(x) for x in _numbers(dtype, raw)))
        out.append([info, dtype, shape, raw.hex()])
    return out


def safetensors(data: bytes) -> tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]:
    """Tensors (dtype, shape, bytes) and metadata; every byte of the file belongs to one of them."""
    need(len(data) >= 8)
    (size,) = struct.unpack("<Q", data[:8])
    need(size <= len(data) - 8)
    # The header's own rules are the format's: its library skips further fields of a tensor, if it can parse them, and
    # of two names takes the last.
    try:
        header = json.loads(data[8 : 8 + size].decode())
    except (ValueError, RecursionError):
        raise Refused from None
    need(isinstance(header, dict))
    metadata = header.pop("__metadata__", {})
    need(table_of(text)(metadata))
    rest, tensors, spans = data[8 + size :], {}, []
    for name, one in header.items():
        need(isinstance(one, dict) and {"dtype", "shape", "data_offsets"} <= set(one))
        need(text(one["dtype"]) and each(whole(0, 2**62))(one["shape"]))
        need(each(whole(0, 2**62))(one["data_offsets"]))
        need(len(one["data_offsets"]) == 2)
        start, end = one["data_offsets"]
        need(one["dtype"] not in SIZES or end - start == SIZES[one["dtype"]] * math.prod(one["shape"]))
        spans.append((start, end))
        tensors[name] = (one["dtype"], one["shape"], rest[start:end])
    at = 0
    for start, end in sorted(spans):
        need(start == at and end >= start)
        at = end
    need(at == len(rest))
    return tensors, metadata


def further_fields(data: bytes) -> bool:
    """Whether the header of a readable file says more of a tensor than the format does."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size].decode())
    return any(len(one) > 3 for name, one in header.items() if name != "__metadata__")


def _numbers(dtype: str, raw: bytes) -> Any:
    if dtype in ("F64", "F32", "F16"):
        return [one for (one,) in struct.iter_unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], raw)]
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]
    mask, top = {"F8_E4M3": (0x7F, 0x7F), "F8_E5M2": (0x7C, 0x7C)}[dtype]
    return [math.nan if one & mask == top else 0.0 for one in raw]


def truth(data: bytes) -> Any:
    """Token ids and row orders."""
    said = value_of(data)
    row = fields({"tokens": lambda x: each(whole())(x) and x != []}, {"row_order": maybe(each(whole(-1)))})
    need(fields({"format": among(1), "secrets": lambda x: each(row)(x) and x != []})(said))
    for one in said["secrets"]:
        order = [place for place in one.get("row_order") or [] if place >= 0]
        need(len(set(order)) == len(order) and all(place < len(one["tokens"]) for place in order))
    return [[one["tokens"], one.get("row_order")] for one in said["secrets"]]


_RECORD = fields(
    {"format": among(1), "verb": text, "spec": lambda x: isinstance(x, dict)},
    {
        "status": text,
        "started": text,
        "finished": maybe(text),
        "command": each(text),
        "inputs_sha256": maybe(text),
        "prompts": maybe(whole()),
        "seeds": table_of(whole(-(2**63), 2**64)),
        "setup": table_of(maybe(lambda x: text(x) or number(x))),
        "summary": maybe(lambda x: isinstance(x, dict)),
        "error": maybe(text),
        "resumed": each(fields({"at": text, "after": whole(), "code": lambda x: isinstance(x, dict)})),
        "code": lambda x: isinstance(x, dict),
        "packages": table_of(maybe(text)),
        "hardware": lambda x: isinstance(x, dict),
        "threads": maybe(whole(1)),
    },
)


def record(data: bytes) -> Any:
    """A record of a run."""
    said = value_of(data)
    need(_RECORD(said))
    return said


_SCORED: dict[str, Rule] = {
    "index": whole(),
    "id": text,
    "text": maybe(text),
    "truth_ids": maybe(each(whole())),
    "recovered": maybe(text),
    "exact": maybe(flag),
    "token_accuracy": maybe(share),
    "bag_of_tokens_recall": maybe(share),
    "rouge_l": maybe(share),
    "bleu": maybe(share),
}
_SAMPLE = fields(
    _SCORED
    | {
        "status": among("attacked"),
        "tokens": whole(),
        "verified": share,
        "evaluated_tokens": maybe(whole()),
        "forward_calls": maybe(whole()),
        "seconds": maybe(amount),
        "prefill_seconds": maybe(amount),
        "epsilon": maybe(number),
        "stop_reason": maybe(text),
        "recovered_ids": each(whole()),
        "positions": maybe(each(whole())),
        "spans": each(
            lambda x: (
                isinstance(x, list)
                and len(x) == 2
                and text(x[0])
                and among("exact", "verified", "wrong", "unverified", "missing")(x[1])
            )
        ),
        "per_token": fields(
            {
                "row": each(whole(-1, 2**64)),
                "distance": each(maybe(number)),
                "margin": each(maybe(number)),
                "evaluated": each(whole()),
                "verified": each(flag),
            }
        ),
    },
    {f"{kind}_tokens{right}": whole() for kind in ("held", "missing") for right in ("", "_right")},
)
_NOT_APPLICABLE = fields(_SCORED | {"status": among("not applicable"), "reason": text})


def samples(data: bytes) -> Any:
    """The samples of an attack, in the order of the prompts; a last line without its end is left out."""
    out = []
    for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]:
        said = value_of(line)
        need(_SAMPLE(said) or _NOT_APPLICABLE(said))
        out.append(said)
    need(len({one["index"] for one in out}) == len(out))
    return sorted(out, key=lambda one: one["index"])


_NAME = lambda x: text(x) and re.fullmatch(r"[a-z0-9][a-z0-9-]{0,99}", x) is not None and "\n" not in x  # noqa: E731
_TABLE = fields(
    {
        "format": among(1),
        "experiment": _NAME,
        "title": text,
        "figures": table_of(text),
        "notes": each(text),
        "command": text,
        "rows": each(
            fields(
                {
                    "keys": table_of(maybe(lambda x: text(x) or number(x) or flag(x))),
                    "figures": table_of(
                        fields(
                            {
                                "value": maybe(number),
                                "low": maybe(number),
                                "high": maybe(number),
                                "n": whole(),
                            }
                        )
                    ),
                    "paper": table_of(maybe(number)),
                    "status": among("measured", "not run"),
                    "reason": maybe(text),
                    "commit": maybe(text),
                    "cell": maybe(_NAME),
                }
            )
        ),
    },
    {"versions": each(text), "over": maybe(text), "curves": maybe(text), "against": maybe(text)},
)


def table(data: bytes) -> Any:
    """A table of an experiment."""
    said = value_of(data)
    need(_TABLE(said))
    return said


def _line(x: Any) -> bool:
    return text(x) and x.isprintable()


_PRINTED = fields(
    {
        "count": whole(1, 2**16),
        "every": whole(1, 2**31 - 1),
        "seed": whole(0, 2**63 - 1),
        "kind": among("gaussian", "orthogonal"),
        "dtype": text,
        "data": text,
    }
)
_SAMPLING = fields(
    {"seed": whole(-(2**63), 2**63 - 1)},
    {
        "method": among("gumbel", "ipt", "greedy"),
        "temperature": lambda x: number(x) and (x == 0 or 0.01 <= x <= 100),
        "top_k": whole(0, 2**64),
        "top_p": lambda x: number(x) and 0 < x <= 1,
    },
)
_TRANSCRIPT = fields(
    {
        "format": among(1),
        "id": _line,
        "model": _line,
        "prompt": lambda x: each(whole())(x) and x != [],
        "output": lambda x: each(whole())(x) and x != [],
        "sampling": _SAMPLING,
    },
    {
        "proofs": maybe(each(text)),
        "proof_rule": maybe(among("paper", "largest", "rows")),
        "fingerprint": maybe(_PRINTED),
        "modes": maybe(each(among("accept", "reject", "bonus"))),
    },
)


def transcripts(data: bytes) -> Any:
    """Requests as a provider reports them."""
    out = []
    for line in data.split(b"\n"):
        if line.strip():
            said = value_of(line)
            need(_TRANSCRIPT(said))
            need((said.get("proofs") is None) == (said.get("proof_rule") is None))
            need(said.get("modes") is None or len(said["modes"]) == len(said["output"]))
            out.append({name: one for name, one in said.items() if one is not None})
    need(out and len({one["id"] for one in out}) == len(out))
    return out


def prompts(data: bytes) -> Any:
    """Prompts of JSON lines. Nothing is asked of other columns; of a name that stands twice the last counts."""
    texts = []
    column = None
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode().removeprefix("\ufeff"))
        except (ValueError, RecursionError):
            raise Refused from None
        if isinstance(row, dict):
            column = _column(row) if column is None else column
            need(column in row)
            row = row[column]
            if column in CHATS and isinstance(row, str) and row.lstrip().startswith("["):
                try:
                    row = json.loads(row)
                except (ValueError, RecursionError):
                    raise Refused from None
        else:
            need(column is None)
        value = _prompt(row)
        need(not re.search("[\ud800-\udfff]", value))
        texts += [value] if value.strip() else []
    need(texts)
    return texts


CHATS = ("messages", "conversations")


def _column(row: dict[str, Any]) -> str:
    usual = [name for name in ("text", "prompt", *CHATS) if name in row]
    others = [name for name, value in row.items() if isinstance(value, str) or _is_chat(value)]
    need(usual or len(others) == 1)
    return (usual or others)[0]


def _is_chat(value: Any) -> bool:
    fits = isinstance(value, list) and value and all(isinstance(m, dict) for m in value)
    return bool(fits) and all("from" in m or {"role", "content"} <= set(m) for m in value)


def _prompt(value: Any) -> str:
    """The text of a prompt: a string, the first of several, token ids with blanks between, contents in lines."""
    if value is None or value == []:
        return ""
    if isinstance(value, str):
        return value
    need(isinstance(value, list))
    kinds = {type(item) for item in value}
    need(len(kinds) == 1 and kinds <= {str, int, dict})
    if kinds == {dict}:
        return "\n".join(map(_content, value))
    return value[0] if kinds == {str} else " ".join(map(str, value))


def _content(message: dict[str, Any]) -> str:
    given = {name: value for name, value in message.items() if value is not None}
    need(isinstance(given.get("role", given.get("from")), str))
    content = given.get("content", given.get("value", ""))
    parts = content if isinstance(content, list) else [content]
    parts = [
        part.get("text") if isinstance(part, dict) and isinstance(content, list) else part for part in parts
    ]
    need(all(isinstance(part, str) for part in parts))
    return "".join(parts)


def _biases(x: Any) -> bool:
    """Whether a value maps token ids, as texts, to biases."""
    return isinstance(x, dict) and all(
        re.fullmatch(r"[0-9]{1,10}", key) is not None
        and int(key) < 300
        and number(bias)
        and -100 <= bias <= 100
        for key, bias in x.items()
    )


def request(data: bytes, chat: bool) -> Any:
    """A request to the HTTP interface: every field is one that is honoured, or says the default."""
    said = value_of(data)
    need(isinstance(said, dict))
    null = lambda x: x is None  # noqa: E731
    most = whole(1, 1024)  # the server's limit
    nothing = "audio function_call functions metadata prediction reasoning_effort suffix web_search_options"
    within = lambda low, high: maybe(lambda x: number(x) and low <= x <= high)  # noqa: E731
    no, likeliest = maybe(lambda x: x is False), maybe(whole(0, 20))
    stop = lambda x: text(x) and 1 <= len(x) <= 200  # noqa: E731
    part = fields({"type": among("text"), "text": text})
    content = lambda x: text(x) or each(part)(x)  # noqa: E731
    turn = fields({"role": among("system", "developer", "user", "assistant"), "content": content})
    rules: dict[str, Rule] = dict.fromkeys(nothing.split(), null) | {
        "max_tokens": maybe(most),
        "temperature": maybe(lambda x: number(x) and 0 <= x <= 2),
        "top_p": maybe(lambda x: number(x) and 0 < x <= 1),
        "top_k": maybe(whole(-1, 2**31 - 1)),
        "min_p": within(0, 1),
        "repetition_penalty": maybe(lambda x: number(x) and 0 < x <= 100),
        "frequency_penalty": within(-2, 2),
        "presence_penalty": within(-2, 2),
        "logit_bias": maybe(_biases),
        "stop_token_ids": maybe(each(whole(0, 299))),
        "ignore_eos": maybe(flag),
        "store": no,
        "service_tier": maybe(among("auto", "default")),
        "safety_identifier": maybe(text),
        "prompt_cache_key": maybe(text),
        "seed": maybe(whole(-(2**63), 2**63 - 1)),
        "stream": maybe(flag),
        "n": maybe(whole(1, 16)),  # so many answers run at once
        "min_tokens": maybe(whole(0, 2**31 - 1)),
        "user": maybe(text),
        "stream_options": maybe(fields({}, {"include_usage": flag})),
        "stop": maybe(lambda x: stop(x) or (each(stop)(x) and len(x) <= 4)),
    }
    if chat:
        needed = {"model": among("tiny/model"), "messages": lambda x: each(turn)(x) and x != []}
        rules |= dict.fromkeys(("tool_choice", "parallel_tool_calls"), null)  # they need tools
        rules |= {
            "max_completion_tokens": maybe(most),
            "logprobs": maybe(flag),
            "top_logprobs": likeliest,
            "tools": maybe(lambda x: x == []),
            "chat_template_kwargs": maybe(lambda x: x == {}),
            "response_format": maybe(fields({"type": among("text")})),
            "modalities": maybe(lambda x: x == ["text"]),
        }
        need(said.get("top_logprobs") is None or said.get("logprobs") is True)
        need(said.get("max_tokens") is None or said.get("max_completion_tokens") is None)
    else:
        ids = each(whole(0, 299))  # of the tiny model's vocabulary
        one = lambda x: (text(x) or ids(x)) and 0 < _size(x) < 512  # noqa: E731
        needed = {
            "model": among("tiny/model"),
            "prompt": lambda x: one(x) or (each(one)(x) and 0 < len(x) <= 16),
        }
        rules |= {"best_of": maybe(whole(1, 16)), "echo": no, "logprobs": likeliest}
        need(said.get("best_of") in (None, said.get("n") or 1))
    need(fields(needed, rules)(said))
    need(said.get("stream_options") is None or said.get("stream") is True)
    longest = said.get("max_tokens") or said.get("max_completion_tokens") or 1024
    need((said.get("min_tokens") or 0) <= longest)
    if chat:
        need(sum(len(f"[{one['role']}]") + _size(_said(one)) + 1 for one in said["messages"]) + 11 < 512)
        need(all(_said(one) != "refuse" for one in said["messages"]))
    return None


def _said(message: Any) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _size(prompt: Any) -> int:
    """Tokens of a prompt: a text has one a byte, and the model takes 512 with the answer's first."""
    return len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
