"""Chat templates: Jinja's sandbox, configured as models' templates expect it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from time import monotonic
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.base.errors import SluiceError, invalid
from services.preprocess.contract.tokenizer import Message, Tool
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.histories import fit, is_plain
from services.preprocess.templates.learning import CannotProbe, learn
from services.preprocess.templates.normalize_messages import ContentFormat, as_templates_expect
from services.preprocess.templates.turns import Turn

CACHED_TEMPLATES = 64
MAX_TEMPLATE_CHARS = 256 << 10
"""Characters of a chat template; a longer one is refused with INVALID_ARGUMENT."""
OUT_OF_MEMORY, TOO_LONG = "chat_template_memory", "chat_template_output"
MAX_REASON_CHARS = 300
"""Characters of a template's own message in an error; the rest is left out."""
LEARNING_SHARE = 0.25
"""Time for learning what a template shows, as a share of a chat's."""


class Refusal(jinja2.TemplateError):
    """The template called raise_exception: it rejects these messages."""


class TemplateTimeout(Exception):
    """The template exceeded its time limit."""


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


class Compiled(NamedTuple):
    """A compiled template, the form of message content it expects, and what it shows once that was needed."""

    template: jinja2.Template
    content: ContentFormat
    learned: list[TemplateCapabilities]


class RenderedText(NamedTuple):
    """A prompt, and what it shows in another place or form than the client's; see `histories.Fitted`."""

    text: str
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=CACHED_TEMPLATES)
def compiled(source: str) -> Compiled:
    """Compiles a template; cached for the most recently used ones.

    Raises:
        SluiceError: INVALID_ARGUMENT, param "chat_template", when it is too long, not valid Jinja, or takes too much
            memory to compile.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise too_long_a_template()
    try:
        tree = _ENVIRONMENT.parse(source)
        content = content_format(tree)
        return Compiled(_ENVIRONMENT.from_string(tree), content, [])
    except jinja2.TemplateSyntaxError as error:
        raise invalid(
            f"The chat template has a syntax error in line {error.lineno}: {_with_full_stop(_truncate(error.message))}",
            param="chat_template",
        ) from error
    except MemoryError:
        raise too_much_memory() from None
    except (SyntaxError, RecursionError, OverflowError, ValueError) as error:
        raise invalid("The chat template is nested too deeply to compile.", param="chat_template") from error


def render(
    source: str,
    variables: dict[str, Any],
    limit_s: float,
    max_chars: int,
    known: TemplateCapabilities | None = None,
) -> RenderedText:
    """Runs a template on a conversation, fitted to what the template can show.

    Time and size are checked between the pieces that a template emits, which bounds the operator's templates. Foreign
    ones must run in `templates.processes`: a loop that emits nothing can take any time, an expression any memory.

    Args:
        source: the template.
        variables: its variables; "messages" are checked OpenAI messages.
        limit_s: maximum run time, seconds.
        max_chars: maximum length of the output.
        known: what the template can show; None: learned here if the conversation needs it.

    Raises:
        SluiceError: INVALID_ARGUMENT; param is "messages" or the message that the template rejects, else
            "chat_template".
    """
    form = compiled(source)
    messages, tools = variables["messages"], variables.get("tools")
    turns: Sequence[Turn] = ()
    notes: tuple[str, ...] = ()
    if not is_plain(messages, tools, known):
        turns, tools, notes = fit(messages, tools, known or _learned(form, variables, limit_s, max_chars))
        messages = [turn.message for turn in turns]
    shown = as_templates_expect(messages, form.content)
    deadline = monotonic() + limit_s
    variables = {**variables, "messages": shown, "tools": tools}
    try:
        return RenderedText(_run(form.template, variables, max_chars, deadline), notes)
    except SluiceError:
        raise
    except TemplateTimeout:
        raise took_too_long(limit_s) from None
    except Exception as error:  # a template is a program and can raise anything
        at = _rejected(form.template, variables, max_chars, deadline, error)
        raise _failure(error, None if at is None else turns[at].origin if turns else at) from error


def probe(source: str, variables: dict[str, Any], limit_s: float, max_chars: int) -> str:
    """Runs a template on a conversation as it is; raises SluiceError as `render`."""
    form = compiled(source)
    deadline = monotonic() + limit_s
    try:
        shown = as_templates_expect(variables["messages"], form.content)
        return _run(form.template, {**variables, "messages": shown}, max_chars, deadline)
    except SluiceError:
        raise
    except TemplateTimeout:
        raise took_too_long(limit_s) from None
    except Exception as error:
        raise _failure(error) from error


def _run(template: jinja2.Template, variables: dict[str, Any], max_chars: int, deadline: float) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.root_render_func(template.new_context(variables)):
        pieces.append(piece)
        size += len(piece)
        if size > max_chars:
            message = f"The chat template produced more than {max_chars:,} characters."
            raise invalid(message, param="chat_template", code=TOO_LONG)
        if monotonic() > deadline:
            raise TemplateTimeout
    return "".join(pieces)


def _learned(form: Compiled, variables: dict[str, Any], limit_s: float, max_chars: int) -> TemplateCapabilities:
    """Returns what a template shows, learned once, in a part of a chat's time."""
    if not form.learned:
        deadline = monotonic() + LEARNING_SHARE * limit_s

        def show(messages: list[Message], tools: list[Tool] | None) -> str | None:
            shown = as_templates_expect(messages, form.content)
            try:
                return _run(form.template, {**variables, "messages": shown, "tools": tools}, max_chars, deadline)
            except TemplateTimeout:
                raise CannotProbe from None
            except MemoryError:
                raise
            except Exception:
                return None

        form.learned.append(learn(show))
    return form.learned[0]


def _rejected(
    template: jinja2.Template, variables: dict[str, Any], max_chars: int, deadline: float, error: Exception
) -> int | None:
    """Returns the message with which the template fails in this way, if it shows those before; else None."""
    messages: list[Message] = variables["messages"]

    def fails(count: int) -> bool:
        try:
            _run(template, {**variables, "messages": messages[:count]}, max_chars, deadline)
        except Exception as other:
            if str(other) != str(error):
                raise
            return True
        return False

    shown, failing = 0, len(messages)
    try:
        while failing - shown > 1:
            middle = (shown + failing) // 2
            shown, failing = (shown, middle) if fails(middle) else (middle, failing)
    except Exception:  # the template needs more of the conversation, or more time
        return None
    return failing - 1 or None


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


def _failure(error: Exception, message: int | None = None) -> SluiceError:
    """Returns the error of a conversation; `message` is the client's message that the template rejects."""
    if isinstance(error, RecursionError):
        return invalid("The chat template recurses too deeply.", param="chat_template")
    if isinstance(error, MemoryError):
        return too_much_memory()
    param = "messages" if message is None else f"messages[{message}]"
    what = param if message is not None else "this conversation"
    if isinstance(error, Refusal):
        return invalid(f"The chat template rejects {what}: {_truncate(error.message)}", param=param)
    reason = _truncate(str(error)) or type(error).__name__
    return invalid(
        f"The chat template failed on {what}: {_with_full_stop(reason)}",
        param="chat_template" if message is None else param,
    )


def _truncate(message: str | None) -> str:
    text = (message or "").encode("utf-8", "replace").decode()  # a template may produce lone surrogates
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}…"


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

    names |= _content_parameters(tree, is_content)
    if not any(is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return ContentFormat.STRING
    if any(test.name == "string" and is_content(test.node) for test in tree.find_all(nodes.Test)):
        return ContentFormat.EITHER
    return ContentFormat.PARTS


def _content_parameters(tree: nodes.Template, is_content: Callable[[nodes.Node], bool]) -> set[str]:
    """Returns the names of the macros' parameters that a message's content is passed as."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = macros[call.node.name].args
            found |= {name.name for name, given in zip(parameters, call.args, strict=False) if is_content(given)}
            found |= {given.key for given in call.kwargs if is_content(given.value)}
    return found


def _is_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
