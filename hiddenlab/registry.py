"""Look up attacks, defenses, metrics, experiments and benches by name, built-in or from plugins.

A spec is ``name``, ``name:key=value,key=value`` or ``name:value`` (the constructor's first parameter). The name may be
that of a Python file of the user's own (``hiddenlab.code_files``). Nothing is imported before a name is resolved, so
listing names loads no torch.
"""

import difflib
import inspect
import math
import re
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from hiddenlab.builtins import BUILTINS as BUILTINS
from hiddenlab.builtins import SYNONYMS
from hiddenlab.errors import HiddenlabError, InputError, UnknownNameError
from hiddenlab.text import first_line

PLUGIN_KINDS = ("attacks", "defenses")
_SESSION: dict[str, dict[str, "_Own"]] = {kind: {} for kind in PLUGIN_KINDS}  # names of this process alone
POSITIONAL = ""  # the key under which ``parse_spec`` returns a value without a name

# Kinds of which users have their own, and what to do then.
OWN = {
    kind: f"; one of your own is named by its file, FILE.py:KEY=VALUE{more} (docs/how-to/own-{word}.md)"
    for kind, word, more in (
        ("attacks", "attack", ""),
        ("defenses", "defense", ", also beside --observation"),
    )
}
SINGULAR = {
    "attacks": "attack",
    "defenses": "defense",
    "hardenings": "hardening",
    "metrics": "metric",
    "experiments": "experiment",
    "measures": "measure",
    "eval": "eval command",
    "benches": "bench",
    "cascade": "cascade command",
    "verify": "verify command",
}
_JOINED = re.compile(r"(?<!\d[eE])(?<!\d\.[eE])\+")
_FILE = re.compile(r"\s*[^:=,]*\.py(?:::\w+)?(?=\s*(?::|$))")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Description(NamedTuple):
    """One entry of ``hiddenlab list``.

    Attributes:
        use_when: of an attack, what follows "Use it when"; empty where the attack says nothing.
    """

    name: str
    summary: str
    parameters: str
    use_when: str = ""


class _Own(NamedTuple):
    """A class of this process, in the form of an entry point."""

    name: str
    factory: Callable[..., Any]
    group: str = "session"
    dist: None = None

    @property
    def value(self) -> str:
        return f"{self.factory.__module__}:{self.factory.__qualname__}"

    def load(self) -> Callable[..., Any]:
        return self.factory


def register(kind: str, name: str, factory: Callable[..., Any]) -> None:
    """Give a class of one's own a name in this process, as entry points do for installed plugins.

    A class that is defined anew, in a notebook for instance, takes the place of its older self.

    Args:
        kind: attacks or defenses. factory: builds the object from the parameters of a spec.

    Raises:
        InputError: the name belongs to something else.
    """
    taken = _table(kind).get(name)
    if (
        taken is not None
        and not is_file(name)
        and (not isinstance(taken, _Own) or taken.value != _Own(name, factory).value)
    ):
        raise InputError(
            f"{_origin(taken)} already has the {SINGULAR[kind]} {name!r} ({taken.value}); give "
            f"{factory.__qualname__} a name of its own"
        )
    _SESSION[kind][name] = _Own(name, factory)


def names(kind: str) -> list[str]:
    """Return the known names of a kind, built-ins first; imports none of them.

    Raises:
        HiddenlabError: a plugin claims a name that is taken.
    """
    return list(_table(kind))


def resolve(kind: str, name: str) -> Callable[..., Any]:
    """Return the class or function of a name.

    Raises:
        UnknownNameError: nobody registered the name; the message names a synonym's target or the nearest name.
        HiddenlabError: the object of the name cannot be imported, or a plugin claims a taken name.
    """
    entry = _entry(kind, name)
    try:
        factory = entry.load()
    except Exception as error:  # a plugin's import may fail in any way; the user is told which plugin it is
        raise HiddenlabError(
            f"cannot load the {SINGULAR[kind]} {name!r} ({entry.value}, from {_origin(entry)}): "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    if not callable(factory):
        raise HiddenlabError(f"the {SINGULAR[kind]} {name!r} ({entry.value}) is no class or function")
    return factory  # type: ignore[no-any-return]


def _entry(kind: str, name: str) -> "EntryPoint | _Own":
    """Return the entry of a name; imports nothing."""
    table = _table(kind)
    if name in table:
        return table[name]
    if is_file(name):
        raise UnknownNameError(
            f"the {SINGULAR[kind]} {name} is code in a file, which runs only where a command or call names it"
        )
    near = _meant(kind, name, table)
    hint = f"; did you mean {near}?" if near else ";"
    own = OWN.get(kind, "")
    raise UnknownNameError(f"unknown {SINGULAR[kind]} {name!r}{hint} known: {', '.join(table)}{own}")


def check_name(kind: str, spec: str) -> None:
    """Check the name in a spec that the user gave, before anything is imported.

    Raises:
        UnknownNameError: nobody registered the name. InputError: it is that of a file that does not exist.
    """
    name, _ = parse_spec(spec)
    if not is_file(name):
        _entry(kind, name)
    elif not Path(file := name.partition("::")[0]).is_file():
        raise InputError(f"there is no file {file}")


def is_file(name: str) -> bool:
    """Return whether a name is that of a Python file, as ``rounding.py`` or ``rounding.py::Round``."""
    return _FILE.fullmatch(name) is not None


def stages_of(defense: str) -> list[str]:
    """Split a defense into the specs of its stages, joined by ``+``; the one of ``1e+3`` joins nothing."""
    return [stage.strip() for stage in _JOINED.split(defense)]


def files_of(text: str) -> list[str]:
    """Return the Python files that the spec of an attack (its path may hold ``+``), or of stages, names."""
    found = []
    for stage in dict.fromkeys([*stages_of(text), text]):
        with suppress(InputError):  # the text is neither
            name, _ = parse_spec(stage)
            found += [name] * is_file(name)
    return found


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split a spec into its name and the texts of its parameters; a value without a key gets the key ``""``.

    Raises:
        InputError: the spec does not read as ``name``, ``name:value`` or ``name:key=value,…``.
    """
    file = _FILE.match(spec)
    head = file.end() if file else 0  # FILE.py::CLASS has colons of its own
    name, colon, rest = (part.strip() for part in spec[head:].partition(":"))
    name = spec[:head].strip() + name
    form = "write NAME, NAME:VALUE or NAME:KEY=VALUE,KEY=VALUE"
    if not name:
        hint = "" if spec else ", and each '+' stands between two names"
        raise InputError(f"{spec!r} names nothing{hint}; {form}")
    values: dict[str, str] = {}
    for position, part in enumerate(rest.split(",") if colon else []):
        left, equals, right = (piece.strip() for piece in part.partition("="))
        key, value = (left, right) if equals else (POSITIONAL, left)
        if not value or (equals and not key):
            raise InputError(f"{spec!r} has an empty key or value; {form}")
        if not equals and position:
            raise InputError(f"in {spec!r} only the first value may stand without a key; {form}")
        if key in values:
            raise InputError(f"{spec!r} gives {key} twice")
        values[key] = value
    return name, values


def build(kind: str, spec: str, **extra: Any) -> Any:
    """Construct the object of a spec; texts are converted by the constructor's annotations.

    Args:
        kind: attacks or defenses. spec: see ``parse_spec``.
        extra: further values by parameter name, from the command line's own options. Those that the constructor does
            not declare are left out, and values of the spec take precedence.

    Raises:
        UnknownNameError: unknown name.
        InputError: unknown, missing or malformed parameter.
    """
    name, texts = parse_spec(spec)
    factory = resolve(kind, name)
    what, known = f"{SINGULAR[kind]} {name}", _parameters(factory)
    takes = f"it takes {_listing(known)}" if known else "it takes no parameters"
    if POSITIONAL in texts:
        value, first = texts.pop(POSITIONAL), next(iter(known), None)
        if first is None or first in texts:
            raise InputError(f"the {what} cannot use the value {value!r}; {takes}")
        texts[first] = value
    if unknown := [key for key in texts if key not in known]:
        raise InputError(f"the {what} has no parameter {unknown[0]!r}; {takes}")
    values = {key: value for key, value in extra.items() if key in known} | texts
    for key, value in values.items():
        if isinstance(value, str):
            try:
                values[key] = _convert(value, known[key].annotation)
            except ValueError as error:
                raise InputError(f"the {what} cannot use {key}={value!r}: {error}; {takes}") from None
    missing = [key for key, p in known.items() if p.default is p.empty and key not in values]
    if missing:
        raise InputError(f"the {what} needs {', '.join(missing)}; {takes}")
    try:
        return factory(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"the {what} refuses its parameters ({first_line(error)}); {takes}") from error


def parameters(kind: str, name: str) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a name's class or function, with annotations resolved to types where possible.

    Raises:
        UnknownNameError: see ``resolve``.
    """
    return _parameters(resolve(kind, name))


def describe(kind: str) -> list[Description]:
    """Return every name with its docstring's first line, its parameters, and when to use it.

    A broken plugin does not end the list.
    """
    lines = []
    for name in names(kind):
        try:
            factory = resolve(kind, name)
        except HiddenlabError as error:
            lines.append(Description(name, f"not usable: {error}", ""))
            continue
        doc = (inspect.getdoc(factory) or "").strip().splitlines()
        use_when = getattr(factory, "use_when", "")  # a function has none, and a plugin may leave it out
        lines.append(
            Description(
                name,
                doc[0] if doc else "",
                _listing(_parameters(factory)),
                use_when if isinstance(use_when, str) else "",
            )
        )
    return lines


def _meant(kind: str, name: str, table: Collection[str]) -> str | None:
    """Return the known name that somebody probably means who wrote an unknown one."""
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    if word in table:
        return word
    if synonym := SYNONYMS.get(kind, {}).get(word):
        return synonym
    return next(iter(difflib.get_close_matches(word, table, n=1)), None)


def _table(kind: str) -> dict[str, EntryPoint | _Own]:
    """Return every known name of a kind with its entry point; built-ins are written as entry points too."""
    if kind not in BUILTINS:
        raise UnknownNameError(f"unknown kind {kind!r}; known: {', '.join(BUILTINS)}")
    table: dict[str, EntryPoint | _Own] = {
        name: EntryPoint(name, value, "builtin") for name, value in BUILTINS[kind].items()
    }
    for entry in entry_points(group=f"hiddenlab.{kind}") if kind in PLUGIN_KINDS else ():
        taken = table.get(entry.name)
        if taken is not None and taken.value != entry.value:
            raise HiddenlabError(
                f"{_origin(entry)} registers the {SINGULAR[kind]} {entry.name!r}, a name that "
                f"{_origin(taken)} already has; rename it in the plugin, or uninstall the plugin"
            )
        table.setdefault(entry.name, entry)
    return table | _SESSION.get(kind, {})


def _origin(entry: EntryPoint | _Own) -> str:
    if entry.group == "builtin":
        return "hiddenlab itself"
    if isinstance(entry, _Own):
        return "this session"
    return f"the plugin {entry.dist.name}" if entry.dist is not None else "a plugin"


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a constructor or function, with annotations resolved to types where possible."""
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        hints: Mapping[str, Any] = get_type_hints(function)
    except Exception:  # annotations that only a type checker can resolve stay texts
        hints = {}
    result = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            result[name] = parameter.replace(annotation=hints.get(name, parameter.annotation))
    return result


def _listing(known: Mapping[str, inspect.Parameter]) -> str:
    """Return parameters as a user reads them: ``sigma: float``, ``mode: per-row|shared = per-row``.

    Those that no text can set (a progress callback, say) are left out.
    """
    parts = []
    for name, parameter in known.items():
        if not _settable(parameter.annotation):
            continue
        kind = "" if parameter.annotation is parameter.empty else f": {_kind(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {_shown(parameter.default)}"
        parts.append(f"{name}{kind}{default}")
    return ", ".join(parts)


def _settable(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_settable(member) for member in get_args(annotation) if member is not type(None))
    plain = (str, int, float, bool, type(None), Any, inspect.Parameter.empty)
    return get_origin(annotation) is Literal or annotation in plain


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return "''" if value == "" else str(getattr(value, "__name__", value))


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(_kind(member) for member in get_args(annotation))
    if annotation is type(None):
        return "none"
    return str(getattr(annotation, "__name__", annotation))


def _convert(text: str, annotation: Any) -> Any:
    """Convert a text to the type of an annotation; ValueError says what was expected."""
    if get_origin(annotation) is Literal:
        for choice in get_args(annotation):
            if str(choice) == text:
                return choice
        raise ValueError(f"expected one of {', '.join(str(choice) for choice in get_args(annotation))}")
    if get_origin(annotation) in (Union, types.UnionType):
        # A plain str takes anything, so it is asked last.
        for member in sorted(get_args(annotation), key=lambda member: member is str):
            try:
                return _convert(text, member)
            except ValueError:
                continue
        raise ValueError(f"expected {_kind(annotation)}")
    if annotation is type(None) and text.lower() == "none":
        return None
    if annotation is bool and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if annotation in (str, Any, inspect.Parameter.empty):
        return text
    if annotation in (int, float):
        try:
            value = annotation(text)
        except ValueError:
            raise ValueError(f"expected {_kind(annotation)}") from None
        if not math.isfinite(value) or abs(value) >= 2**64:
            raise ValueError("expected a finite number below 2^64")
        return value
    if annotation in (bool, type(None)):
        raise ValueError(f"expected {_kind(annotation)}")
    raise ValueError("it cannot be given as a text")


def parse_numbers(name: str, text: str, least: int = 1) -> list[int]:
    """Return ``1,6,11`` as numbers.

    Args:
        name: of the option, for the error. least: the smallest number that is possible.

    Raises:
        InputError: some part is no such number, or a number stands twice.
    """
    words = [word.strip() for word in text.split(",")]
    decimal = all(word.isdecimal() and len(word) < 10 for word in words)
    if not decimal or min(numbers := [int(word) for word in words]) < least:
        raise InputError(f"{name} {text[:60]!r} is no list of numbers; write for instance 1,6,11")
    if len(set(numbers)) < len(numbers):
        raise InputError(f"{name} {text[:60]!r} names a number twice")
    return numbers
