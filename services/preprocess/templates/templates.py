"""Chat templates: Jinja's sandbox, configured as models' templates expect it."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from services.common.errors import SluiceError, invalid
from services.preprocess.templates.clock import BOUND_VALUE, TICK, Clock, TemplateTimeout, instrumented
from services.preprocess.templates.guards import (
    BOUND,
    LEAST_MOST,
    MOST_ATTRIBUTE,
    GuardedEnvironment,
    bounded,
    check_json,
)
from services.preprocess.templates.normalize_messages import ContentFormat, as_templates_expect

CACHED_TEMPLATES = 64
MAX_TEMPLATE_CHARS = 256 << 10
OUT_OF_MEMORY, TOO_LONG = "chat_template_memory", "chat_template_output"
MOST_REASON_CHARS = 300
"""Maximum characters of a template's own message in an error."""


class Refusal(jinja2.TemplateError):
    """The template called raise_exception: it rejects these messages."""


class GenerationTag(Extension):
    """Ignores ``{% generation %}…{% endgeneration %}``, which marks the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the body in its own scope, as templates expect."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    check_json(indent, separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > MOST_ATTRIBUTE:
        raise SecurityError("a date format is too long")
    return datetime.now().strftime(form)


def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters[TICK] = pass_context(lambda context, value: _CLOCK.tick())
    environment.filters[BOUND_VALUE] = bounded
    return environment


_CLOCK = Clock()
_ENVIRONMENT = _environment()


class Compiled(NamedTuple):
    """A compiled template and the form of message content it expects."""

    template: jinja2.Template
    content: ContentFormat


@lru_cache(maxsize=CACHED_TEMPLATES)
def compiled(source: str) -> Compiled:
    """Compiles a template; cached for the most recently used ones.

    Raises:
        SluiceError: INVALID_ARGUMENT, param "chat_template", when it is too long or not valid Jinja.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise too_long_a_template()
    try:
        tree = _ENVIRONMENT.parse(source)
        content = content_format(tree)
        return Compiled(_ENVIRONMENT.from_string(instrumented(tree)), content)
    except jinja2.TemplateSyntaxError as error:
        raise invalid(
            f"The chat template has a syntax error in line {error.lineno}: {_with_full_stop(_truncate(error.message))}",
            param="chat_template",
        ) from error
    except (SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
        raise invalid("The chat template is nested too deeply to compile.", param="chat_template") from error


def render(source: str, variables: dict[str, Any], limit_s: float, max_chars: int) -> str:
    """Runs a template.

    Time is checked in every loop, size between the pieces a template emits. This bounds benign templates; potentially
    hostile ones must run in `templates.processes`, because a single expression can take any time and memory.

    Args:
        source: the template.
        variables: its variables; "messages" are checked OpenAI messages.
        limit_s: maximum run time, seconds.
        max_chars: maximum length of the output.

    Raises:
        SluiceError: INVALID_ARGUMENT; param "messages" when the template rejects the messages, else "chat_template".
    """
    template, content = compiled(source)
    variables = {**variables, "messages": as_templates_expect(variables["messages"], content)}
    _CLOCK.deadline = monotonic() + limit_s
    BOUND.most = max(LEAST_MOST, max_chars)
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.root_render_func(template.new_context(variables)):
            pieces.append(piece)
            size += len(piece)
            if size > max_chars:
                raise _too_long(max_chars)
        return "".join(pieces)
    except SluiceError:
        raise
    except TemplateTimeout:
        raise took_too_long(limit_s) from None
    except Exception as error:  # a template is a program and can raise anything
        raise _failure(error) from error


def too_long_a_template() -> SluiceError:
    """Returns the error of a template with too many characters."""
    return invalid(
        f"The chat template is longer than {MAX_TEMPLATE_CHARS:,} characters; shorten it.", param="chat_template"
    )


def took_too_long(limit_s: float) -> SluiceError:
    """Returns the error of a template that exceeded its time limit."""
    return invalid(f"The chat template did not finish within {limit_s:g} s.", param="chat_template")


def too_much_memory() -> SluiceError:
    """Returns the error of a template that exceeded its process's memory limit."""
    return invalid("The chat template requires too much memory.", param="chat_template", code=OUT_OF_MEMORY)


def _too_long(max_chars: int) -> SluiceError:
    return invalid(
        f"The chat template produced more than {max_chars:,} characters.", param="chat_template", code=TOO_LONG
    )


def _failure(error: Exception) -> SluiceError:
    if isinstance(error, Refusal):
        return invalid(f"The chat template rejects these messages: {_truncate(error.message)}", param="messages")
    if isinstance(error, RecursionError):
        return invalid("The chat template recurses too deeply.", param="chat_template")
    if isinstance(error, MemoryError):
        return too_much_memory()
    reason = _truncate(str(error)) or type(error).__name__
    return invalid(f"The chat template failed on these messages: {_with_full_stop(reason)}", param="chat_template")


def _truncate(message: str | None) -> str:
    text = (message or "").encode("utf-8", "replace").decode()  # a template may produce lone surrogates
    return text if len(text) <= MOST_REASON_CHARS else f"{text[:MOST_REASON_CHARS]}…"


def _with_full_stop(sentence: str | None) -> str:
    return (sentence or "").rstrip(". ") + "."


def content_format(tree: nodes.Template) -> ContentFormat:
    """Returns PARTS or EITHER if a template iterates over a message's content, else STRING."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }

    def is_content(node: nodes.Node) -> bool:
        return _is_content(node) or (isinstance(node, nodes.Name) and node.name in names)

    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return ContentFormat.STRING
    if any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test)):
        return ContentFormat.EITHER
    return ContentFormat.PARTS


def _is_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
