"""Calls rendered in the format of every built-in parser, as the families' templates write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.postprocess.parsers.families import FAMILIES
from services.postprocess.parsers.families.family import Call

Render = Callable[[Sequence[Call]], str]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: object) -> str:
    """A value between tags: strings as they are, others as JSON."""
    return value if isinstance(value, str) else _json(value)


def _python_text(value: object) -> str:
    """A value between tags as templates with `| string` write it: True, None, and lists as Python does."""
    return value if isinstance(value, str) else repr(value)


def _object(call: Call, word: str = "arguments") -> str:
    return _json({"name": call[0], word: call[1]})


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"


def _mistral_11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def _deepseek(calls: Sequence[Call]) -> str:
    one = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(one) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    one = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(one) + "<｜tool▁calls▁end｜>"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for name, given in calls
    )


def _qwen_coder(text: Callable[[object], str]) -> Render:
    def render(calls: Sequence[Call]) -> str:
        written = []
        for name, given in calls:
            values = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in given.items())
            written.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
        return "\n".join(written)

    return render


def _glm(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in given.items()
        )
        written.append(f"<tool_call>{name}\n{values}</tool_call>")
    return "\n".join(written)


def _minimax(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in given.items())
        written.append(f'<invoke name="{name}">\n{values}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def _kimi(calls: Sequence[Call]) -> str:
    one = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for index, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(one)}<|tool_calls_section_end|>"


def _granite(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(map(_object, calls))}]"


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    Attributes:
        parser: the tool parser.
        render: writes calls.
        untyped: the text does not tell strings from other values, the tools' schemas do.
    """

    parser: str
    render: Render
    untyped: bool = False


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat("hermes", _hermes),
    "llama3_json": CallFormat("llama3_json", _llama),
    "pythonic": CallFormat("pythonic", _pythonic),
    "mistral": CallFormat("mistral", _mistral),
    "mistral, tokenizer 11": CallFormat("mistral", _mistral_11),
    "deepseek_v3": CallFormat("deepseek_v3", _deepseek),
    "deepseek_v3, V3.1": CallFormat("deepseek_v3", _deepseek_v31),
    "harmony": CallFormat("harmony", _harmony),
    "qwen3_coder": CallFormat("qwen3_coder", _qwen_coder(_text), untyped=True),
    "qwen3_coder, Python values": CallFormat("qwen3_coder", _qwen_coder(_python_text), untyped=True),
    "glm45": CallFormat("glm45", _glm, untyped=True),
    "minimax_m2": CallFormat("minimax_m2", _minimax, untyped=True),
    "kimi_k2": CallFormat("kimi_k2", _kimi),
    "granite": CallFormat("granite", _granite),
}
FORMATS |= {
    family.name: CallFormat(family.name, family.write, family.untyped)
    for family in FAMILIES
    if family.write is not None
}
