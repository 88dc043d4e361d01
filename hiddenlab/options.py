"""Declare the options that several commands share, each once."""

import os
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from hiddenlab.errors import InputError
from hiddenlab.utils.schema import LARGEST, MOST_POSITIONS, MOST_THREADS, Position, Positive, Seed, Threads

# Groups of options in help.
INPUT, FOREIGN, MODEL, DEFENSE = "Input", "States of another program", "Model", "Defense"
SEARCH, OUTPUT = "Search", "Output"

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
        rich_help_panel=INPUT,
        help="File (text, JSON, CSV, parquet, Arrow), 'hf:NAME…', '-' or 'builtin' (default).",
    ),
]
ColumnOpt = Annotated[
    str | None,
    Option("--column", metavar="NAME", rich_help_panel=INPUT, help="Column that holds the prompts."),
]
TemplateOpt = Annotated[
    bool,
    Option(
        "--template/--no-template",
        rich_help_panel=INPUT,
        help="Messages in the model's chat template, or their contents alone.",
    ),
]
LimitOpt = Annotated[
    Positive | None,
    Option(
        "--limit", metavar="N", min=1, max=LARGEST, rich_help_panel=INPUT, help="Use the first N prompts."
    ),
]
MaxTokensOpt = Annotated[
    Positive | None,
    Option(
        "--max-tokens",
        metavar="N",
        min=1,
        max=LARGEST,
        rich_help_panel=INPUT,
        help="Cut each prompt to N tokens.",
    ),
]
ModelOpt = Annotated[
    str | None,
    Option(
        "--model",
        metavar="NAME",
        rich_help_panel=MODEL,
        help="'builtin' (default), a name of 'make models', a directory, a GGUF file or a hub id.",
    ),
]
LayerOpt = Annotated[
    int | None,
    Option("--layer", metavar="L", rich_help_panel=MODEL, help="States after L layers; default: the middle."),
]
SomeLayersOpt = Annotated[
    str | None,
    Option(
        "--layer",
        metavar="L",
        rich_help_panel=MODEL,
        help="Attack the states after L layers; default: the middle. 1,6,11 or 'all': several, one after another.",
    ),
]
StreamOpt = Annotated[
    Stream | None,
    Option(
        "--stream",
        rich_help_panel=MODEL,
        help="Which states (k, v: a KV cache; embed: layer 0); default: resid.",
    ),
]
_defense = Option(
    "--defense",
    metavar="SPEC",
    rich_help_panel=DEFENSE,
    help="What the provider does to the states; several, applied in order, or joined by '+'; see 'hiddenlab list "
    "defenses'. One of your own: FILE.py:KEY=VALUE.",
)
DefenseOpt = Annotated[tuple[str, ...], _defense]
DefensesOpt = Annotated[list[str] | None, _defense]
SeedOpt = Annotated[
    Seed,
    Option(
        "--seed",
        metavar="S",
        min=-(2**63),
        max=2**63 - 1,
        rich_help_panel=SEARCH,
        help="Seed of everything that is drawn.",
    ),
]
DeviceOpt = Annotated[str, Option("--device", rich_help_panel=MODEL, help="auto, cpu, cuda, cuda:N.")]
EngineOpt = Annotated[
    Literal["auto", "packed", "plain"],
    Option(
        "--engine",
        rich_help_panel=MODEL,
        help="packed is fast; plain runs the model's own forward; auto checks which is right.",
    ),
]
TrustOpt = Annotated[
    bool,
    Option(
        "--trust-remote-code",
        rich_help_panel=MODEL,
        help="Run code that the model's checkpoint brings; it can do whatever you can. Default: refuse it.",
    ),
]
DeviceMapOpt = Annotated[
    str | None,
    Option("--device-map", rich_help_panel=MODEL, help="How accelerate places layers on devices, e.g. auto."),
]
DtypeOpt = Annotated[
    Dtype,
    Option("--dtype", rich_help_panel=MODEL, help="Number format of all that is computed."),
]
ThreadsOpt = Annotated[
    Threads | None,
    Option(
        "--threads", metavar="N", min=1, max=MOST_THREADS, rich_help_panel=MODEL, help="CPU threads of torch."
    ),
]
OutOpt = Annotated[
    Path | None,
    Option("--out", metavar="DIR", rich_help_panel=OUTPUT, help="The run's directory, a new one."),
]
RunsDirOpt = Annotated[
    Path, Option("--runs-dir", metavar="DIR", rich_help_panel=OUTPUT, help="Where run directories are made.")
]
NoRecordOpt = Annotated[bool, Option("--no-record", rich_help_panel=OUTPUT, help="Write no run directory.")]
JsonOpt = Annotated[
    bool, Option("--json", rich_help_panel=OUTPUT, help="One JSON object on stdout, and nothing else there.")
]
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
    StatesFormat,
    Option(
        "--format",
        rich_help_panel=FOREIGN,
        help="The program that saved the states; auto tells it by the names.",
    ),
]
AxesOpt = Annotated[
    str | None,
    Option(
        "--axes",
        metavar="A,B,…",
        rich_help_panel=FOREIGN,
        help="What the axes are: layers, batch, tokens, width, heads, head.",
    ),
]
TensorOpt = Annotated[
    str | None, Option("--tensor", metavar="NAME", rich_help_panel=FOREIGN, help="Which array of the file.")
]
LayersOpt = Annotated[
    str | None,
    Option(
        "--layers",
        metavar="2,18,…",
        rich_help_panel=FOREIGN,
        help="Which layers a file of several holds, where it does not say.",
    ),
]
FirstPositionOpt = Annotated[
    Position | None,
    Option(
        "--first-position",
        metavar="N",
        min=0,
        max=MOST_POSITIONS - 1,
        rich_help_panel=FOREIGN,
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
        rich_help_panel=FOREIGN,
        help="Leave out the first N rows of each prompt, which are padding.",
    ),
]
SplitOpt = Annotated[
    str | None,
    Option(
        "--split",
        metavar="N,…",
        rich_help_panel=FOREIGN,
        help="Rows in which further prompts begin, where a file joins several.",
    ),
]
CheckOpt = Annotated[
    bool,
    Option(
        "--check/--no-check",
        rich_help_panel=FOREIGN,
        help="Look what the rows are before they are attacked, and refuse those of another layer, norm or layout.",
    ),
]
IdsOpt = Annotated[
    str | None,
    Option(
        "--ids",
        metavar="FILE",
        rich_help_panel=FOREIGN,
        help="Token ids, to score; the attack never sees them.",
    ),
]
MaskOpt = Annotated[
    str | None,
    Option(
        "--mask", metavar="FILE", rich_help_panel=FOREIGN, help="Attention mask: 0 where a row is padding."
    ),
]
