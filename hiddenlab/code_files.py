"""Load defenses and attacks from a Python file that the user names, such as ``rounding.py:decimals=2``."""

import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from hiddenlab import registry
from hiddenlab.errors import InputError
from hiddenlab.text import first_line

_PREFIX = "hiddenlab_file:"  # of modules that are files of the user's own
_READ = "__hiddenlab_read__"  # what a module's file held when it ran
# What a class of a kind has at least.
_PARTS = {"attacks": ("fit", "recover"), "defenses": ("provider", "inputs", "states", "publish")}


def load_named(kind: str, spec: str) -> None:
    """Load the Python file that a spec names, and register its class; do nothing for a spec that names no file.

    The file's code runs, and it can do whatever the user can. So only what the user names is loaded: never a spec that
    was read from a file of states or from a record.

    Args:
        kind: attacks or defenses.
        spec: ``FILE.py``, or ``FILE.py::CLASS`` where the file has several classes of the kind, with parameters behind
            a colon as in any spec.

    Raises:
        InputError: there is no such file, its code fails, or it has no such class.
    """
    name, _ = registry.parse_spec(spec)
    if not registry.is_file(name):
        return
    path, _, wanted = name.partition("::")
    module = _module(Path(path))
    classes = [item for item in vars(module).values() if inspect.isclass(item) and _is(kind, item, module)]
    what = registry.SINGULAR[kind]
    if wanted:
        chosen = [item for item in classes if item.__name__ == wanted]
    else:
        chosen = [item for item in classes if not item.__name__.startswith("_")]
    if len(chosen) == 1:
        registry.register(kind, name, chosen[0])
        return
    there = ", ".join(item.__name__ for item in classes)
    if not chosen:
        sort = f"no {what} {wanted}" if wanted else f"no {what}"
        raise InputError(
            f"{path} has {sort}; " + (f"it has {there}" if there else f"see docs/how-to/own-{what}.md")
        )
    raise InputError(
        f"{path} has several classes of this kind ({there}); name one: {path}::{chosen[0].__name__}"
    )


def failed_in(error: Exception) -> str | None:
    """Say in one line where an error arose in a file that was loaded here; None where it did not."""
    loaded = {module.__file__ for name, module in list(sys.modules.items()) if name.startswith(_PREFIX)}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in loaded]
    if not frames:
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {type(error).__name__}: {first_line(error)}"


def _is(kind: str, item: type[Any], module: ModuleType) -> bool:
    return item.__module__ == module.__name__ and all(hasattr(item, part) for part in _PARTS[kind])


def _module(path: Path) -> ModuleType:
    """Run a file, once in this process unless it changes.

    Raises:
        InputError: see ``load_named``.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    name = f"{_PREFIX}{path.resolve()}"
    code = path.read_bytes()
    if name in sys.modules and vars(sys.modules[name])[_READ] == code:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    vars(module)[_READ] = code
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {first_line(error)}") from error
    return module
