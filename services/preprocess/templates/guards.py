"""Keeps a single step of a template from creating huge values.

Jinja's sandbox bounds only `range`: `{{ 'a'|center(10 ** 9) }}` is one native call, during which neither the clock nor
the output size is checked. These guards check the arguments of operations that can multiply, and the values a template
assigns. They are cheap and apply to every template; what they miss (sums in one expression, lists that contain each
other many times) is bounded by the limits of the processes for foreign templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper, wraps
from string import Formatter
from threading import local
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import generate_lorem_ipsum
from markupsafe import Markup

LEAST_MOST = 1 << 22
MOST_DIGITS_OF_WIDTH = 4
MOST_LINES = 100_000
MOST_INDENT = 64
MOST_ATTRIBUTE = 1_024
MOST_PRECISION = 400
_MAX_BASE, _MAX_EXPONENT = 1 << 32, 64
_MAX_PRODUCT = 1 << 40
_WIDE = re.compile(rf"\d{{{MOST_DIGITS_OF_WIDTH + 1}}}").search
_WIDE_OR_GIVEN = re.compile(rf"%[^a-zA-Z%]*(?:\*|\d{{{MOST_DIGITS_OF_WIDTH + 1}}})").search


class _Bound(local):
    """Maximum characters or items a template may assign or create in one step, for the template on this thread."""

    most = LEAST_MOST


BOUND = _Bound()


def refuse_beyond(size: float, subject: str) -> None:
    """Raises SecurityError when a size exceeds BOUND."""
    if size > BOUND.most:
        raise SecurityError(f"{subject} is too large")


def bounded(value: Any) -> Any:
    """Returns the value; raises SecurityError for a string or a list too long to be assigned."""
    if isinstance(value, str | list | tuple) and len(value) > BOUND.most:
        raise SecurityError("a variable is too large")
    return value


def _number(value: Any) -> float:
    return abs(value) if isinstance(value, int | float) else 0


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


# --- operators ---


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError where `**`, `*` or `%` would create a huge value."""
    if operator == "**" and (_magnitude(left) > _MAX_BASE or _magnitude(right) > _MAX_EXPONENT):
        raise SecurityError("a power is too large")
    if operator == "*" and _magnitude(left) * _magnitude(right) > _most_of_product(left, right):
        raise SecurityError("a product is too large")
    if operator == "%" and isinstance(left, str | bytes):
        _check_percent(left if isinstance(left, str) else left.decode("latin-1"), right)


def _magnitude(value: Any) -> float:
    if isinstance(value, int | float):
        return abs(value)
    return len(value) if isinstance(value, str | bytes | list | tuple) else 1


def _most_of_product(left: Any, right: Any) -> int:
    return _MAX_PRODUCT if isinstance(left, int | float) and isinstance(right, int | float) else BOUND.most


def _check_percent(form: str, values: Any) -> None:
    if _WIDE_OR_GIVEN(form):
        raise SecurityError("the width of a format is too large")
    values = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    places = form.count("%")
    if places > 1:
        refuse_beyond(places * max((len(str(value)) for value in values), default=0), "a formatted text")


class _BoundedFormatter:
    """Formats fields like str.format, up to BOUND."""

    _formatted = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _WIDE(format_spec):
            raise SecurityError("the width of a format is too large")
        text = super().format_field(value, format_spec)  # type: ignore[misc]
        self._formatted += len(text)
        refuse_beyond(self._formatted, "a formatted text")
        return text


class _PlainFormatter(_BoundedFormatter, SandboxedFormatter):
    pass


class _EscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    pass


# --- methods ---


def _check_width(text: Any, width: Any = 0, *_: Any) -> None:
    refuse_beyond(_number(width), "a padding")


def _check_tabs(text: Any, tabsize: Any = 8) -> None:
    refuse_beyond(_number(tabsize) * max(1, text.count("\t" if isinstance(text, str) else b"\t")), "a text")


def _check_replacement(text: Any, old: Any = "", new: Any = "", count: Any = -1) -> None:
    longer = _size(new) - _size(old)
    if longer <= 0:
        return
    occurrences = text.count(old)
    if isinstance(count, int) and count >= 0:
        occurrences = min(occurrences, count)
    refuse_beyond(_size(text) + occurrences * longer, "a replacement")


def _check_items(separator: Any, items: Any) -> None:
    refuse_beyond(sum(map(_size, items)) + len(items) * len(separator), "a joined text")


def _check_table(text: Any, table: Any = None, *_: Any) -> None:
    longest = max(map(_size, table.values()), default=0) if isinstance(table, dict) else 0
    refuse_beyond(longest * len(text), "a translated text")


def _check_bytes(number: Any, length: Any = 1, *_: Any, **__: Any) -> None:
    refuse_beyond(_number(length), "a number's bytes")


_METHODS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "ljust": _check_width,
    "rjust": _check_width,
    "zfill": _check_width,
    "expandtabs": _check_tabs,
    "replace": _check_replacement,
    "join": _check_items,
    "translate": _check_table,
    "to_bytes": _check_bytes,
}


# --- filters ---


def _check_center(value: Any, width: Any = 80) -> None:
    _check_width(value, width)


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(str(value), kwargs or args)


def _check_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replacement(str(text), str(old), str(new), -1 if count is None else count)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    refuse_beyond((str(text).count("\n") + 1) * (_size(width) or _number(width)), "an indented text")


def _check_batch(value: Any, linecount: Any, *_: Any, **__: Any) -> None:
    if _number(linecount) > MOST_LINES:
        raise SecurityError("a batch is too large")


def _check_slice(value: Any, slices: Any, *_: Any, **__: Any) -> None:
    _check_batch(value, slices)


def _check_wordwrap(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any, **__: Any
) -> None:
    written = str(text)
    lines = 2 * len(written) / max(1, _number(width)) + written.count("\n") + 1
    refuse_beyond(len(written) + lines * _size(wrapstring), "a wrapped text")


def _check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if _number(precision) > MOST_PRECISION:
        raise SecurityError("a precision is too large")


def _check_urlize(value: Any, *args: Any, **kwargs: Any) -> None:
    if any(_size(value) > MOST_ATTRIBUTE for value in (*args, *kwargs.values())):
        raise SecurityError("an attribute is too large")


def check_json(indent: Any, separators: Any) -> None:
    """Raises SecurityError for long arguments of tojson that are repeated in its output."""
    if _number(indent) > MOST_INDENT or any(_size(text) > MOST_INDENT for text in (indent, *(separators or ()))):
        raise SecurityError("an indentation is too large")


_FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_center,
    "format": _check_format,
    "replace": _check_replace,
    "indent": _check_indent,
    "batch": _check_batch,
    "slice": _check_slice,
    "wordwrap": _check_wordwrap,
    "round": _check_round,
    "urlize": _check_urlize,
}


def _guarded(filter_: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Returns the filter behind its check; both get the template's arguments, the filter also the one Jinja passes."""
    own = 1 if getattr(filter_, "jinja_pass_arg", None) is not None else 0

    @wraps(filter_)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args[own:], **kwargs)
        return filter_(*args, **kwargs)

    return run


def _read_once(filter_: Callable[..., Any], check: Callable[[list[Any], Any], None]) -> Callable[..., Any]:
    """Returns a guarded filter of an iterable, which can be read only once."""

    @wraps(filter_)
    def run(passed: Any, value: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        items = list(value)
        check(items, (args, kwargs))
        return filter_(passed, items, *args, **kwargs)

    return run


def _check_join(items: list[Any], values: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = values
    separator = str(args[0] if args else kwargs.get("d", ""))
    refuse_beyond(sum(map(_size, items)) + len(items) * len(separator), "a joined text")


def _check_sum(items: list[Any], values: Any) -> None:
    refuse_beyond(sum(map(_size, items)), "a sum")


def _short_lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    if n > MOST_INDENT or max > MOST_ATTRIBUTE:
        raise SecurityError("a filler text is too large")
    return generate_lorem_ipsum(n, html, min, max)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no operator, method, filter or macro creates a huge value, not even at compile time."""

    intercepted_binops = frozenset(("**", "*", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters.update({name: _guarded(FILTERS[name], check) for name, check in _FILTERS.items()})
        self.filters["join"] = _read_once(FILTERS["join"], _check_join)
        self.filters["sum"] = _read_once(FILTERS["sum"], _check_sum)
        self.globals["lipsum"] = _short_lipsum

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator; raises SecurityError when the result would be huge."""
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls an object; raises SecurityError when the result would be huge."""
        kind = type(__obj)
        if kind is BuiltinMethodType or kind is MethodType:
            check = _METHODS.get(__obj.__name__)
            if check is not None and isinstance(__obj.__self__, str | bytes | int):
                if check is _check_items and args:
                    args = (list(args[0]), *args[1:])  # iterators can be read only once
                check(__obj.__self__, *args, **kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        return bounded(result) if kind is Macro else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns str.format and str.format_map with bounded formatters."""
        if not isinstance(value, MethodType | BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        form = value.__self__
        if not isinstance(form, str):
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return type(form)(_formatter(self, form).vformat(form, args, kwargs))

        return update_wrapper(run, value)


def _formatter(environment: Environment, form: str) -> Formatter:
    if isinstance(form, Markup):
        return _EscapeFormatter(environment, escape=form.escape)
    return _PlainFormatter(environment)
