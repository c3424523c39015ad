"""Calls rendered in the format of every built-in parser, as the families' templates write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.postprocess.parsers.families.gemma import QUOTE
from services.postprocess.parsers.families.minimax_m3 import NAMESPACE

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""
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


def _dsml(lead: str, wrapper: str) -> Render:
    opening, closing = f"<｜DSML｜{lead}", f"</｜DSML｜{lead}"

    def render(calls: Sequence[Call]) -> str:
        written = []
        for name, given in calls:
            values = "".join(
                f'{opening}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_text(value)}'
                f"{closing}parameter>\n"
                for key, value in given.items()
            )
            written.append(f'{opening}invoke name="{name}">\n{values}{closing}invoke>\n')
        return f"{opening}{wrapper}>\n{''.join(written)}{closing}{wrapper}>"

    return render


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(_gemma_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


def _gemma(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(given)}<tool_call|>" for name, given in calls)


def _kimi_k3(calls: Sequence[Call]) -> str:
    written = []
    for number, (name, given) in enumerate(calls, 1):
        values = "".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "object"}"<|sep|>'
            f"{_text(value)}<|close|>argument<|sep|>"
            for key, value in given.items()
        )
        written.append(f'<|open|>call tool="{name}" index="{number}"<|sep|>{values}<|close|>call<|sep|>')
    return f"<|open|>tools<|sep|>{''.join(written)}<|close|>tools<|sep|>"


def minimax_m3_element(name: str, value: Any) -> str:
    """An argument, or a member of one, as MiniMax M3 writes it."""
    if isinstance(value, dict) and value:
        inner = "".join(minimax_m3_element(key, child) for key, child in value.items())
    elif isinstance(value, list) and value:
        inner = "".join(minimax_m3_element("item", child) for child in value)
    else:
        inner = "" if value in ({}, []) and not isinstance(value, bool | int | float | str) else _text(value)
    return f"{NAMESPACE}<{name}>{inner}{NAMESPACE}</{name}>"


def _minimax_m3(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "\n".join(minimax_m3_element(key, value) for key, value in given.items())
        written.append(f'{NAMESPACE}<invoke name="{name}">\n{values}\n{NAMESPACE}</invoke>\n')
    return f"{NAMESPACE}<tool_call>\n{''.join(written)}{NAMESPACE}</tool_call>"


def _seed_oss(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(f"<parameter={key}>{_text(value)}</parameter>\n" for key, value in given.items())
        written.append(f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>")
    return "\n".join(written)


def _step3(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(
            f'<steptml:parameter name="{key}">{_text(value)}</steptml:parameter>\n' for key, value in given.items()
        )
        written.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n{values}</steptml:invoke>'
            "<｜tool_call_end｜>\n"
        )
    return f"<｜tool_calls_begin｜>\n{''.join(written)}<｜tool_calls_end｜>"


def _hunyuan(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in given.items()
        )
        written.append(f"<tool_call>{name}<tool_sep>\n{values}</tool_call>\n")
    return f"<tool_calls>\n{''.join(written)}</tool_calls>"


def _cohere(calls: Sequence[Call]) -> str:
    written = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": given}
        for index, (name, given) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{_json(written)}<|END_ACTION|>"


def _array(start: str, end: str = "") -> Render:
    return lambda calls: f"{start}[{', '.join(map(_object, calls))}]{end}"


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
    "mistral": CallFormat("mistral", _array("[TOOL_CALLS] ")),
    "mistral, tokenizer 11": CallFormat("mistral", _mistral_11),
    "deepseek_v3": CallFormat("deepseek_v3", _deepseek),
    "deepseek_v3, V3.1": CallFormat("deepseek_v3", _deepseek_v31),
    "harmony": CallFormat("harmony", _harmony),
    "qwen3_coder": CallFormat("qwen3_coder", _qwen_coder(_text), untyped=True),
    "qwen3_coder, Python values": CallFormat("qwen3_coder", _qwen_coder(_python_text), untyped=True),
    "glm45": CallFormat("glm45", _glm, untyped=True),
    "minimax_m2": CallFormat("minimax_m2", _minimax, untyped=True),
    "kimi_k2": CallFormat("kimi_k2", _kimi),
    "granite": CallFormat("granite", _array("<|tool_call|>")),
    "deepseek_v32": CallFormat("deepseek_v32", _dsml("", "function_calls")),
    "gemma4": CallFormat("gemma4", _gemma, untyped=True),
    "kimi_k3": CallFormat("kimi_k3", _kimi_k3),
    "minimax_m3": CallFormat("minimax_m3", _minimax_m3, untyped=True),
    "seed_oss": CallFormat("seed_oss", _seed_oss, untyped=True),
    "step3": CallFormat("step3", _step3, untyped=True),
    "hy_v3": CallFormat("hy_v3", _hunyuan, untyped=True),
    "cohere_command3": CallFormat("cohere_command3", _cohere),
    "phi4_mini_json": CallFormat("phi4_mini_json", _array("functools")),
    "jamba": CallFormat("jamba", _array("<tool_calls>", "</tool_calls>")),
    "nemotron_deci": CallFormat("nemotron_deci", _array("<TOOLCALL>", "</TOOLCALL>")),
    "hunyuan_a13b": CallFormat("hunyuan_a13b", _array("<tool_calls>", "</tool_calls>")),
    "deepseek_v41": CallFormat("deepseek_v41", _dsml(" ", "calls")),
}
