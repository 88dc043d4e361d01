"""Lay out help for 80 columns, with options in groups, and import a command's module only when it is used."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

NAMES_WIDTH = 24  # columns of help that hold the names of options; longer names stand on a line of their own
LONGEST_CHOICES = 30  # letters of choices that stand beside an option's name; more stand in its description
ARGUMENTS, OTHER, HELP = "Arguments", "Options", "Help"  # groups of what names none
VALUES = {"str": "TEXT", "int": "N", "float": "X", "path": "PATH"}  # what stands for a value, by its type


class Command(TyperCommand):
    """A command whose help shows its options in groups, in the order of their first options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and groups of options."""
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """A command with commands of its own; each is listed with its first line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write commands, then options."""
        self.format_commands(ctx, formatter)
        _write_options(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the first sentence of its help, which no width cuts."""
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        write_section(formatter, "Commands", rows)


class Program(typer.Typer):
    """A Typer whose commands have the plain, grouped help, and take ``-h``."""

    def __init__(self, help: str, cls: type[TyperGroup] = Group, **settings: Any) -> None:
        super().__init__(
            help=help,
            cls=cls,
            context_settings={"help_option_names": ["-h", "--help"]},
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            add_completion=False,
            no_args_is_help=True,
            **settings,
        )

    def command(  # type: ignore[override]  # what is left out goes on as it is
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function as a command."""
        return super().command(name, cls=cls or Command, **settings)


class LazyCommands(MutableMapping[str, Any]):
    """Commands by name, each imported when it is first asked for.

    Args:
        places: by name, ``module:attribute`` of a function or of a ``Program``.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, _, attribute = self._places[name].partition(":")
            made = getattr(import_module(module), attribute)
            if not isinstance(made, typer.Typer):
                function, made = made, typer.Typer(add_completion=False, rich_markup_mode=None)
                made.command(name, cls=Command)(function)
            command = typer.main.get_command(made)
            command.name = name
            self._loaded[name] = command
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._places[name], self._loaded[name] = "", command

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the arguments of a command, and its options in groups, with true defaults."""
    groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OTHER: []}
    for parameter in command.get_params(ctx):
        if getattr(parameter, "hidden", False):
            continue
        kind = ARGUMENTS if parameter.param_type_name == "argument" else OTHER
        group = HELP if parameter.name in ("help", "version") else getattr(parameter, "rich_help_panel", None)
        groups.setdefault(group or kind, []).append(record(parameter, ctx))
    groups[HELP] = groups.pop(HELP)  # at the end
    for title, rows in groups.items():
        if rows:
            write_section(formatter, title, rows)


def write_section(formatter: Any, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Write one titled list of names with their descriptions."""
    with formatter.section(title):
        formatter.write_dl(list(rows), col_max=NAMES_WIDTH)


def record(parameter: Any, ctx: Any) -> tuple[str, str]:
    """Return the names of an option with what stands for its value, and its description with its default."""
    text, notes = parameter.help or "", []
    value, choices = value_of(parameter, ctx)
    if parameter.param_type_name == "argument":
        name = parameter.metavar or value
    else:
        names = ", ".join(sorted(parameter.opts, key=len))
        if parameter.secondary_opts:
            names += f" / {', '.join(parameter.secondary_opts)}"
        name = f"{names} {value}".strip()
    if choices:
        notes.append(f"one of {', '.join(choices)}")
    if parameter.param_type_name == "option" and parameter.multiple:
        notes.append("may be repeated")
    default = parameter.default
    unset = default is None or default is False or default in ((), [], "")  # 0 == False, and is a default
    if not unset and "default" not in text.lower():
        notes.append(f"default: {parameter.opts[0] if default is True else default}")
    if parameter.required:
        notes.append("required")
    return name, f"{text} [{'; '.join(notes)}]".strip() if notes else text


def value_of(parameter: Any, ctx: Any) -> tuple[str, list[str]]:
    """Return what stands for the value of an option or argument, and its choices where they do not stand there."""
    argument = parameter.param_type_name == "argument"
    if not argument and parameter.is_flag:
        return "", []
    shown = str(parameter.display_type_rich(ctx)).strip("<>")
    if argument:
        return parameter.name.upper(), shown.split("|") if "|" in shown else []
    if parameter.metavar:
        return parameter.metavar, []
    if "|" in shown:
        return (shown, []) if len(shown) <= LONGEST_CHOICES else ("NAME", shown.split("|"))
    return VALUES.get(shown.removeprefix("list[").removesuffix("]"), shown.upper()), []


def accept_any_text() -> None:
    """Write what the terminal's encoding lacks as an escape (``\\u2248``), where it would end as an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
