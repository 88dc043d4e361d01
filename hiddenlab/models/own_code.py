"""Find the classes of a checkpoint that brings its own code, which runs only where the user asks for it."""

from collections.abc import Mapping
from typing import Any

from hiddenlab.errors import InputError

PACKAGE = "transformers_modules"  # where transformers puts code that came with a checkpoint


def own_code_refused(name: str, file: str) -> InputError:
    """Return the error for a model that cannot be read without its own code.

    Args:
        name: the model's. file: which of its files names the code.
    """
    return InputError(
        f"{name} brings its own code (auto_map in its {file}), which is not run unasked: it can do whatever you can; "
        "if you trust it, 'hiddenlab attack' and 'capture' take --trust-remote-code, load_model trust_remote_code=True"
    )


def own_class(config: Any, factory: Any, path: str, revision: str | None) -> Any:
    """Return the checkpoint's own class for one of transformers' ``Auto`` classes; None where it brings none.

    Only for a model whose code the user trusts: the code is imported.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    names = getattr(config, "auto_map", None)
    reference = names.get(factory.__name__) if isinstance(names, Mapping) else None
    if not isinstance(reference, str):
        return None
    return get_class_from_dynamic_module(reference, path, revision=revision, code_revision=revision)


def is_own(value: object) -> bool:
    """Return whether an object's class came with a checkpoint, and is none of transformers'."""
    return type(value).__module__.startswith(PACKAGE)
