"""Build a command from a configuration class: each field is an option, declared only there."""

import dataclasses
import inspect
import types
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


def takes(
    config: type, leave_out: tuple[str, ...] = (), name: str = "config"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a configuration class as options; the command gets one object in their place.

    Args:
        config: a dataclass whose fields are ``Annotated[type, typer.Option(…)]``.
        leave_out: fields that stay at their defaults. name: of the command's parameter for the object.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(config, include_extras=True)
        fields = [field for field in dataclasses.fields(config) if field.name not in leave_out]
        parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if _is_tuple(hints[field.name]) else field.default,
                annotation=_for_typer(hints[field.name]),
            )
            for field in fields
        ]
        own_hints = get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[own_name])
            for own_name, parameter in inspect.signature(function).parameters.items()
            if own_name != name
        ]

        @wraps(function)
        def command(**given: Any) -> None:
            options = {field.name: given.pop(field.name) for field in fields}
            for field in fields:
                if _is_tuple(hints[field.name]):
                    options[field.name] = tuple(options[field.name] or ())
            function(**{name: config(**options)}, **given)

        signature = inspect.Signature([*parameters, *own], return_annotation=None)
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorate


def _is_tuple(hint: Any) -> bool:
    return get_origin(get_args(hint)[0]) is tuple


def _for_typer(hint: Any) -> Any:
    """Return the annotation with its option, without the value checks within it, which typer does not know."""
    inner, *options = get_args(hint)
    if _is_tuple(hint):
        return Annotated[list[str] | None, options[0]]
    known = [option for option in options if type(option).__module__.startswith("typer")]
    return Annotated[_bare(inner), known[0]]


def _bare(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_bare(member) for member in get_args(hint))]  # noqa: UP007
    return hint
