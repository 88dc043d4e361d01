"""Read what a checkpoint says of its quantized weights: dequantize them, leave them to a library, or refuse them."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.text import first_line

# transformers turns these into plain weights while it reads them; the last one needs the library of that name.
DEQUANTIZED = ("fp8", "mxfp8", "mxfp4", "compressed-tensors")
ADVICE = "give the model in bfloat16, or as a GGUF file"


def method_of(settings: Any) -> str:
    """Return the name of the method by which weights are quantized, from a configuration's ``quantization_config``."""
    values = settings if isinstance(settings, Mapping) else {}
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    return str(values.get("quant_method", "")).removeprefix("QuantizationMethod.").lower()


def quantization_settings(settings: Any, label: str) -> dict[str, Any] | None:
    """Return a configuration's ``quantization_config`` as it is to be loaded; None where weights are plain.

    transformers loads quantized weights of an unknown method as if they were plain ones.

    Raises:
        InputError: the method is unknown.
    """
    if settings is None:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # takes a second

    method = method_of(settings)
    if method not in {
        name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING
    }:
        said = (
            f"by {method[:60]!r}, which transformers does not know"
            if method
            else "and does not say by what method"
        )
        raise InputError(f"{label} is quantized {said} (quantization_config in its config.json); {ADVICE}")
    return {**settings, "dequantize": True} if method in DEQUANTIZED else dict(settings)


def check_library(settings: Mapping[str, Any], label: str, device_map: Any) -> None:
    """Check that quantized weights can be read here.

    Args:
        settings: a configuration's ``quantization_config``, empty where weights are plain. label: the model's name in
            errors. device_map: as for transformers.

    Raises:
        InputError: a library or a device is missing.
    """
    if not settings:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except Exception as error:  # each method raises what it likes
        way = "install it, or " if isinstance(error, ImportError) else ""
        raise InputError(
            f"{label} is quantized by {method_of(settings)}, which cannot be read here ({first_line(error)}); "
            + way
            + ADVICE
        ) from None


def check_blocks(
    settings: Mapping[str, Any], shapes: Mapping[str, tuple[str, tuple[int, ...]]], label: str
) -> None:
    """Check that every float8 weight is whole blocks: transformers scales the parts of a cut block wrongly.

    Args:
        settings: a configuration's ``quantization_config``. shapes: dtype and shape of each tensor of the checkpoint.

    Raises:
        InputError: a weight is not whole blocks.
    """
    block = settings.get("weight_block_size", (128, 128))
    if method_of(settings) != "fp8" or block is None:
        return
    for name, (_, grid) in sorted(shapes.items()):
        kind, shape = shapes.get(name.removesuffix("_scale_inv"), ("", ()))
        if not name.endswith("_scale_inv") or not kind.startswith("F8") or len(grid) != 2:
            continue
        if shape[-2:] != (grid[0] * block[0], grid[1] * block[1]):
            raise InputError(
                f"{label} gives {name.removesuffix('_scale_inv')} of shape {shape} in blocks of {tuple(block)}, which "
                f"cut it: transformers would scale it wrongly; {ADVICE}"
            )


@contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Silence LLM.int8's warning, at every product, that it casts to float16."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
