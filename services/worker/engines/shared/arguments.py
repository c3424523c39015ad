"""Parses `--engine-args`: engine-specific options as a JSON object or as `key=value,key=value`."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from services.common.base.errors import SluiceError, invalid

Options = TypeVar("Options")


def parse_engine_args(text: str) -> dict[str, Any]:
    """Returns the options by name; dashes in names become underscores.

    In the short form, a value that is valid JSON (`3`, `true`, `null`) is decoded and any other value is a string.
    A value that contains a comma needs the JSON form.

    Raises:
        SluiceError: INVALID_ARGUMENT when the text has neither form or sets an option twice.
    """
    text = text.strip()
    if not text:
        return {}
    pairs = _json_pairs(text) if text.startswith("{") else [_short_pair(part) for part in text.split(",")]
    options: dict[str, Any] = {}
    for key, value in pairs:
        name = key.strip().lstrip("-").replace("-", "_")
        if not name:
            raise _invalid_args("--engine-args contains an option without a name; use key=value.")
        if name in options:
            raise _invalid_args(f"--engine-args sets {name!r} twice; set it once.")
        options[name] = value
    return options


def check_names(options: dict[str, Any], known: Iterable[str], engine: str) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) for an unknown option; the message suggests the closest known one."""
    names = sorted(known)
    for name in options:
        if name not in names:
            matches = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"available options: {', '.join(names)}."
            raise _invalid_args(f"The {engine} engine has no option {name!r}; {hint}")


def read_options(text: str, kind: type[Options], engine: str) -> Options:
    """Parses `--engine-args` into a dataclass; options that are not set keep the dataclass's defaults.

    Args:
        text: Value of `--engine-args`.
        kind: Dataclass with a default for every field; fields are str, int, float or bool, optionally None, or
            a tuple of str, which a list sets, or one text.
        engine: Engine name for error messages.

    Raises:
        SluiceError: INVALID_ARGUMENT for an unknown option or a value of the wrong type.
    """
    options = parse_engine_args(text)
    types = get_type_hints(kind)
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    check_names(options, (field.name for field in fields), engine)
    return kind(**{name: _typed(name, value, types[name], engine) for name, value in options.items()})


def _typed(name: str, value: Any, declared: Any, engine: str) -> Any:
    if get_origin(declared) is tuple:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise _invalid_args(f"Option {name!r} of the {engine} engine must be a list of texts, not {value!r}.")
        return tuple(texts)
    allowed = get_args(declared) or (declared,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if str in allowed and isinstance(value, int | float) and int not in allowed and not isinstance(value, bool):
        return str(value)
    if type(value) not in allowed:
        expected = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
        raise _invalid_args(f"Option {name!r} of the {engine} engine must be {expected}, not {value!r}.")
    return value


def _json_pairs(text: str) -> list[tuple[str, Any]]:
    try:
        pairs: list[tuple[str, Any]] = json.JSONDecoder(object_pairs_hook=_Pairs).decode(text)
    except (ValueError, RecursionError) as error:
        raise _invalid_args(f"--engine-args is not a valid JSON object: {error}.") from error
    return [(name, _plain(value)) for name, value in pairs]


class _Pairs(list[tuple[str, Any]]):
    """Holds a JSON object as key-value pairs, so that duplicate keys are detected."""


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {name: _plain(inner) for name, inner in value}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _short_pair(part: str) -> tuple[str, Any]:
    name, separator, value = part.partition("=")
    if not separator:
        raise _invalid_args(f"--engine-args contains {part!r}; use key=value pairs or a JSON object.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _invalid_args(message: str) -> SluiceError:
    return invalid(message, param="engine_args")
