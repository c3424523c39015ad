"""Chat templates: Jinja's sandbox set up the way models' templates expect it."""

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
from services.preprocess.templates.clock import KEPT, TICK, Clock, TemplateTimeout, watched
from services.preprocess.templates.guards import BOUND, LEAST_MOST, MOST_ATTRIBUTE, GuardedEnvironment, check_json, kept
from services.preprocess.templates.normalize_messages import ContentFormat, as_templates_expect

KEPT_TEMPLATES = 64
MAX_TEMPLATE_CHARS = 256 << 10
OUT_OF_MEMORY, TOO_LONG = "chat_template_memory", "chat_template_output"
MOST_REASON_CHARS = 300
"""What an error repeats of a template's own words."""


class Refusal(jinja2.TemplateError):
    """The template called raise_exception: it does not accept these messages."""


class GenerationTag(Extension):
    """Ignores ``{% generation %}…{% endgeneration %}``, which marks the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own, as templates are written for."""
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
        raise SecurityError("a date's format is too long")
    return datetime.now().strftime(form)


def _environment() -> GuardedEnvironment:
    environment = GuardedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters[TICK] = pass_context(lambda context, value: _CLOCK.tick())
    environment.filters[KEPT] = kept
    return environment


_CLOCK = Clock()
_ENVIRONMENT = _environment()


class Compiled(NamedTuple):
    """A template ready to run, and the form of messages' content it is written for."""

    template: jinja2.Template
    content: ContentFormat


@lru_cache(maxsize=KEPT_TEMPLATES)
def compiled(source: str) -> Compiled:
    """The template, compiled once while it is among the last used.

    Raises:
        SluiceError: INVALID_ARGUMENT, param "chat_template", when it is too long or not Jinja.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise too_long_a_template()
    try:
        tree = _ENVIRONMENT.parse(source)
        content = content_format(tree)
        return Compiled(_ENVIRONMENT.from_string(watched(tree)), content)
    except jinja2.TemplateSyntaxError as error:
        raise invalid(
            f"The chat template has a syntax error in line {error.lineno}: {_ended(_cut(error.message))}",
            param="chat_template",
        ) from error
    except (SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
        raise invalid("The chat template is nested too deeply to be compiled.", param="chat_template") from error


def render(source: str, variables: dict[str, Any], limit_s: float, max_chars: int) -> str:
    """Runs a template.

    Time is checked in every loop, size between the pieces a template emits. That bounds honest templates; one that may
    be hostile belongs into `template_process`, because it can spend any time and memory in one expression.

    Args:
        source: the template.
        variables: what it sees; "messages" are checked OpenAI messages.
        limit_s: longest that it may run, seconds.
        max_chars: longest result.

    Raises:
        SluiceError: INVALID_ARGUMENT; param "messages" when the template refuses the messages, else "chat_template".
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
    except Exception as error:  # a template is a program: it can fail in every way
        raise _failure(error) from error


def too_long_a_template() -> SluiceError:
    """The template itself has too many characters."""
    return invalid(f"The chat template is longer than {MAX_TEMPLATE_CHARS:,} characters.", param="chat_template")


def took_too_long(limit_s: float) -> SluiceError:
    """The template was given up."""
    return invalid(f"The chat template did not finish within {limit_s:g} s.", param="chat_template")


def too_much_memory() -> SluiceError:
    """The template ran into the limit of its process."""
    return invalid("The chat template needs too much memory.", param="chat_template", code=OUT_OF_MEMORY)


def _too_long(max_chars: int) -> SluiceError:
    return invalid(f"The chat template made more than {max_chars:,} characters.", param="chat_template", code=TOO_LONG)


def _failure(error: Exception) -> SluiceError:
    if isinstance(error, Refusal):
        return invalid(f"The chat template refuses these messages: {_cut(error.message)}", param="messages")
    if isinstance(error, RecursionError):
        return invalid("The chat template recurses too deeply.", param="chat_template")
    if isinstance(error, MemoryError):
        return too_much_memory()
    reason = _cut(str(error)) or type(error).__name__
    return invalid(f"The chat template failed on these messages: {_ended(reason)}", param="chat_template")


def _cut(words: str | None) -> str:
    text = (words or "").encode("utf-8", "replace").decode()  # a template can spell what no message can carry
    return text if len(text) <= MOST_REASON_CHARS else f"{text[:MOST_REASON_CHARS]}…"


def _ended(sentence: str | None) -> str:
    return (sentence or "").rstrip(". ") + "."


def content_format(tree: nodes.Template) -> ContentFormat:
    """Parts where a template walks over a message's content, otherwise one string."""
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
