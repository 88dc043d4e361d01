"""Convert GGUF files to safetensors in the cache, once; the parts of a split file are joined first."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hiddenlab.errors import InputError
from hiddenlab.models.checkpoint import check_loaded
from hiddenlab.models.reading import quiet_transformers
from hiddenlab.text import first_line
from hiddenlab.utils.cache import cache_path
from hiddenlab.utils.digests import digest_of_files
from hiddenlab.utils.files import new_folder

MOST_PARTS = 1000
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def converted(gguf: Path) -> Path:
    """Return the directory with the safetensors form of a GGUF file, converted now if it is not cached.

    It is converted into a temporary folder, which is then renamed.

    Args:
        gguf: the file, or any part of a split one.

    Raises:
        InputError: a part is missing, the file cannot be read, or it lacks a tensor.
    """
    files = parts(gguf)
    target = folder_for(gguf.stem, digest_of_files(files))
    if (target / "config.json").is_file():
        return target
    with new_folder(target) as work:
        whole = gguf
        if len(files) > 1:
            whole = work / "whole.gguf"
            _join(files, whole)
        _convert(whole, gguf, work)
        if whole != gguf:
            whole.unlink()
    if not (target / "config.json").is_file():
        raise InputError(f"the cache holds something damaged at {target}; remove it")
    return target


def folder_for(stem: str, digest: str) -> Path:
    """Return the folder in the cache for a GGUF file's safetensors form.

    Args:
        stem: of the file's name. digest: of the file, or of its parts (``digest_of_files``).
    """
    return cache_path("models", f"{stem}-{digest[:16]}")


def parts(gguf: Path) -> list[Path]:
    """Return the files of a GGUF model in order; the file alone where its name is not that of a part.

    Raises:
        InputError: one of them is missing.
    """
    named = PART.fullmatch(gguf.name)
    if named is None:
        return [gguf]
    number, count = int(named["number"]), int(named["count"])
    if not 1 <= number <= count <= MOST_PARTS:
        raise InputError(f"{gguf} is named part {number} of {count}, which cannot be")
    files = [gguf.with_name(f"{named['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in files:
        if not part.is_file():
            raise InputError(f"{gguf} is one of {count} parts of a model, of which {part.name} is missing")
    return files


def _join(files: list[Path], target: Path) -> None:
    """Write the parts of a split file as one: the metadata of the first, the tensors of all."""
    try:
        _write_joined(files, target)
    except Exception as error:  # the readers raise errors of any type for damaged files
        raise InputError(f"cannot read {files[0]} and its other parts: {first_line(error)}") from None


def _write_joined(files: list[Path], target: Path) -> None:
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys

    readers = [GGUFReader(file) for file in files]
    fields = readers[0].fields
    writer = GGUFWriter(target, fields[Keys.General.ARCHITECTURE].contents(), endianess=readers[0].endianess)
    # The writer writes the first two itself; the last belongs to the split.
    left_out = ("GGUF.", Keys.General.ARCHITECTURE, "split.")
    for field in fields.values():
        if not field.name.startswith(left_out):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def _convert(gguf: Path, named: Path, target: Path) -> None:
    """Write a GGUF file as a transformers directory; ``named`` is its name in errors."""
    from gguf import GGUFReader, Keys
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    factory: Any = AutoModelForCausalLM
    try:
        fields = GGUFReader(gguf).fields
    except Exception as error:  # the reader raises errors of any type for damaged files
        raise InputError(
            f"cannot read the GGUF file {named}: {first_line(error)}; it is damaged or incomplete, copy it again"
        ) from None
    try:
        # The reader of GGUF files draws its own progress bar, whatever transformers' settings are.
        with quiet_transformers(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            model, info = factory.from_pretrained(
                gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
            check_loaded(model, info, None, f"the GGUF file {named}")
            model.save_pretrained(target)
            if Keys.Tokenizer.LIST in fields:
                AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    except InputError:
        raise
    except Exception as error:
        # The readers raise errors of any type for damaged files.
        raise InputError(f"cannot read the GGUF file {named}: {first_line(error)}") from None
