"""Flags of a command, made from a dataclass and from the settings that they repeat."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

OPTION = "option"

Command = TypeVar("Command", bound=Callable[..., None])


class CommandFlags(Protocol):
    """A dataclass whose fields are flags.

    A field made by `flag` describes its own. One that is a dataclass of flags is a group of them. Any other repeats the
    setting of the same name in `SETTINGS`, a class variable: the type and meaning are the setting's, and the field's
    default stands for a flag that is not given.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Group = TypeVar("Group", bound=CommandFlags)


def flag(default: Any, meaning: str, *names: str, repr: bool = True, **options: Any) -> Any:
    """Returns the field of a flag; a default of MISSING makes it required, other arguments are as of `typer.Option`."""
    return field(default=default, repr=repr, metadata={OPTION: typer.Option(*names, help=meaning, **options)})


def with_flags(kind: type[CommandFlags], without: Collection[str] = ()) -> Callable[[Command], Command]:
    """Gives a command the flags of a dataclass in place of its `**flags`, which are to be passed to `made`.

    Args:
        without: names of fields that are no flags of this command.
    """

    def declare(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        parameters = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [one for one in _parameters(kind) if one.name not in without]
        command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return declare


def made(kind: type[Group], given: Mapping[str, Any]) -> Group:
    """Returns the dataclass of the flags of a command line."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            values[one.name] = made(hints[one.name], given)
        elif (value := given.get(one.name)) is not None:
            values[one.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def arguments(**values: Any) -> tuple[str, ...]:
    """Returns settings as arguments of a service; None leaves one to the service."""
    words: list[str] = []
    for name, value in values.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{word}" if value else f"--no-{word}")
        elif value is not None:
            for one in (value,) if isinstance(value, str) or not isinstance(value, tuple) else value:
                words += (f"--{word}", str(one))
    return tuple(words)


def _parameters(kind: type[CommandFlags]) -> Iterator[inspect.Parameter]:
    hints: dict[str, Any] = get_type_hints(kind)
    for one in fields(kind):
        hint, default = hints[one.name], inspect.Parameter.empty if one.default is MISSING else one.default
        if is_dataclass(hint):
            yield from _parameters(hint)  # type: ignore[arg-type]
            continue
        if option := one.metadata.get(OPTION):
            hint = Annotated[hint, option]
        else:
            settings: type[BaseSettings] = kind.SETTINGS  # type: ignore[attr-defined]
            hint, default = _repeated(one.name, settings.model_fields[one.name]), default or None
        yield inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _repeated(name: str, setting: FieldInfo) -> Any:
    """Returns the annotation of a flag that repeats a setting."""
    kind = setting.annotation
    switch = [f"--{name.replace('_', '-')}"] if kind is bool else []  # without --no-: off is the default
    low = next((bound.ge for bound in setting.metadata if hasattr(bound, "ge")), None)
    several = get_origin(kind) is list
    metavar = "<str>" if several else "FILE" if Path in (kind, *get_args(kind)) else None
    meaning = f"{setting.description}; may be repeated" if several else setting.description
    option = typer.Option(*switch, help=meaning, min=low, metavar=metavar)
    return Annotated[kind if kind is bool or NoneType in get_args(kind) else kind | None, option]  # type: ignore[operator]
