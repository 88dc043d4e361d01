"""Declare the options that several commands share, each once."""

import os
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import LARGEST, MOST_POSITIONS, MOST_THREADS, Position, Positive, Seed, Threads

Stream = Literal["resid", "final_norm", "logits", "embed", "q", "k", "v", "kv", "qkv", "attn"]
Dtype = Literal["float32", "bfloat16", "float16"]


def _text(prompt: str | None) -> str | None:
    """Refuse a prompt that is no text, or a path given by mistake: its letters would be the prompt."""
    try:
        path = prompt is not None and os.path.exists(prompt)
        (prompt or "").encode()
    except ValueError:
        raise InputError("the PROMPT is not UTF-8 text") from None
    if path:
        raise InputError(
            f"{prompt} is a file or a folder, and PROMPT is the text itself; --prompts reads prompts from a file, "
            "--observation or --states hidden states; '-' takes this very text from standard input"
        )
    return prompt


PromptArg = Annotated[
    str | None, Argument(metavar="PROMPT", help="The prompt; '-' reads standard input.", callback=_text)
]
PromptsOpt = Annotated[
    str | None,
    Option(
        "--prompts",
        metavar="SRC",
        help="File (text, JSON, CSV, parquet, Arrow), 'hf:NAME…', '-' or 'builtin' (default).",
    ),
]
ColumnOpt = Annotated[str | None, Option("--column", metavar="NAME", help="Column that holds the prompts.")]
TemplateOpt = Annotated[
    bool,
    Option(
        "--template/--no-template", help="Messages in the model's chat template, or their contents alone."
    ),
]
LimitOpt = Annotated[
    Positive | None, Option("--limit", metavar="N", min=1, max=LARGEST, help="At most so many prompts.")
]
MaxTokensOpt = Annotated[
    Positive | None,
    Option("--max-tokens", metavar="N", min=1, max=LARGEST, help="Cut each prompt to N tokens."),
]
ModelOpt = Annotated[
    str | None,
    Option(
        "--model",
        metavar="NAME",
        help="'builtin' (default), a name of 'make models', a directory, a GGUF file or a hub id.",
    ),
]
LayerOpt = Annotated[
    int | None, Option("--layer", metavar="L", help="States after L layers; default: the middle.")
]
SomeLayersOpt = Annotated[
    str | None,
    Option(
        "--layer",
        metavar="L",
        help="States after L layers; default: the middle. 1,6,11 or 'all': each layer is attacked, one after another.",
    ),
]
StreamOpt = Annotated[
    Stream | None, Option("--stream", help="Which states (k, v: a KV cache; embed: layer 0); default: resid.")
]
_defense = Option(
    "--defense", metavar="SPEC", help="May be repeated, applied in order; see 'hiddenlab list defenses'."
)
DefenseOpt = Annotated[tuple[str, ...], _defense]
DefensesOpt = Annotated[list[str] | None, _defense]
SeedOpt = Annotated[
    Seed, Option("--seed", metavar="S", min=-(2**63), max=2**63 - 1, help="Seed of everything that is drawn.")
]
DeviceOpt = Annotated[str, Option("--device", help="auto, cpu, cuda, cuda:N.")]
EngineOpt = Annotated[
    Literal["auto", "packed", "plain"],
    Option(
        "--engine", help="packed is fast; plain runs the model's own forward; auto checks which is right."
    ),
]
TrustOpt = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        help="Run code that the model's checkpoint brings; it can do whatever you can. Default: refuse it.",
    ),
]
DeviceMapOpt = Annotated[str | None, Option("--device-map", help="Placement by accelerate, e.g. auto.")]
DtypeOpt = Annotated[Dtype, Option("--dtype", help="In which the attacker (and the provider) computes.")]
ThreadsOpt = Annotated[
    Threads | None, Option("--threads", metavar="N", min=1, max=MOST_THREADS, help="CPU threads of torch.")
]
OutOpt = Annotated[Path | None, Option("--out", metavar="DIR", help="The run's directory, a new one.")]
RunsDirOpt = Annotated[Path, Option("--runs-dir", metavar="DIR", help="Where run directories are made.")]
NoRecordOpt = Annotated[bool, Option("--no-record", help="Write no run directory.")]
JsonOpt = Annotated[bool, Option("--json", help="One JSON object on stdout, and nothing else there.")]
StatesFormat = Literal[
    "auto",
    "sglang",
    "vllm",
    "vllm-pair",
    "llama.cpp",
    "transformer-lens",
    "cache",
    "transformers",
    "modules",
    "plain",
]
FormatOpt = Annotated[
    StatesFormat, Option("--format", help="The program that saved the states; auto tells it by the names.")
]
AxesOpt = Annotated[
    str | None,
    Option("--axes", metavar="A,B,…", help="What the axes are: layers, batch, tokens, width, heads, head."),
]
TensorOpt = Annotated[str | None, Option("--tensor", metavar="NAME", help="Which array of the file.")]
LayersOpt = Annotated[
    str | None,
    Option("--layers", metavar="2,18,…", help="Which layers a file of several holds, where it does not say."),
]
FirstPositionOpt = Annotated[
    Position | None,
    Option(
        "--first-position",
        metavar="N",
        min=0,
        max=MOST_POSITIONS - 1,
        help="Position of the first row; default 0.",
    ),
]
SkipRowsOpt = Annotated[
    Position,
    Option(
        "--skip-rows",
        metavar="N",
        min=0,
        max=MOST_POSITIONS - 1,
        help="Leave out the first N rows of each prompt, which are padding.",
    ),
]
SplitOpt = Annotated[
    str | None,
    Option("--split", metavar="N,…", help="Rows in which further prompts begin, where a file joins several."),
]
CheckOpt = Annotated[
    bool,
    Option(
        "--check/--no-check",
        help="Look what the rows are before they are attacked, and refuse those of another layer, norm or layout.",
    ),
]
IdsOpt = Annotated[
    str | None, Option("--ids", metavar="FILE", help="Token ids, to score; the attack never sees them.")
]
MaskOpt = Annotated[
    str | None, Option("--mask", metavar="FILE", help="Attention mask: 0 where a row is padding.")
]
