"""Outputs as models of many families write them, whole, cut off and broken; and the tools they call."""

from __future__ import annotations

import json
import random
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"city": "Zürich 🌧️", "days": 3, "metric": True}
JSON = json.dumps(CALL, ensure_ascii=False)
NAMED = f'{{"name": "get_weather", "arguments": {JSON}}}'
NOW = '{"name": "now", "arguments": {}}'
XML = "<parameter=city>\nZürich 🌧️\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
INVOKE = (
    '<invoke name="get_weather"><parameter name="city">Zürich 🌧️</parameter>'
    '<parameter name="days">3</parameter></invoke>'
)
THOUGHT = "<think>\nHm, 你好 🤔.\n</think>\n\n"

OUTPUTS: tuple[str, ...] = (
    "Plain text, 你好 👩‍👩‍👧 and no call.",
    THOUGHT + "The answer is 4.",
    "Thought without a beginning.\n</think>\nThe answer.",
    "<think>never closed",
    f"Let me look.\n<tool_call>\n{NAMED}\n</tool_call>",
    f"{THOUGHT}<tool_call>\n{NAMED}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
    f"<tool_call>\n<function=get_weather>\n{XML}</function>\n</tool_call>",
    f"{THOUGHT}<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n{XML}</function>\n"
    "</tool_call>",
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🌧️</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{JSON}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    f"<seed:think>Hm.</seed:think><seed:tool_call>\n<function=get_weather>\n{XML}</function>\n</seed:tool_call>",
    f'{{"name": "get_weather", "parameters": {JSON}}}',
    f"<|python_tag|>{NAMED}",
    "[get_weather(city='Zürich', days=3), now()]",
    "<|python_start|>[get_weather(city='Zürich', days=3)]<|python_end|>",
    f"[TOOL_CALLS][{NAMED}, {NOW}]",
    f"[THINK]Hm 🤔[/THINK]Well.[TOOL_CALLS]get_weather[ARGS]{JSON}",
    f"<|tool_call|>[{NAMED}]",
    f"<tool_calls>[{NAMED}]</tool_calls>",
    f'<|action_start|><|plugin|>{{"name": "get_weather", "parameters": {JSON}}}<|action_end|>',
    f"functools[{NAMED}]",
    f"[{NAMED}, {NOW}]",
    "<|tool_call_start|>[get_weather(city='Zürich', days=3)]<|tool_call_end|>",
    f"<longcat_tool_call>\n{NAMED}\n</longcat_tool_call>",
    "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}<end_function_call>",
    f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather"
    f"<|constrain|>json<|message|>{JSON}<|call|>",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
    f"<think>a</think><tool_call>{NAMED}</tool_call> and text after",
    '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call> more',
    "5 < 6 and <b>bold</b> {not json} [nor a list]",
)


def corpus(seed: int, markers: list[str], size: int) -> list[str]:
    """All outputs, some cut off or with something put in, and fragments in any order."""
    draw = random.Random(seed)
    texts = list(OUTPUTS)
    pieces = [*markers, NAMED, NOW, JSON, XML, "\n", " ", "text ", "😀", '"city": "x"', "{", "}"]
    while len(texts) < size:
        text = draw.choice(OUTPUTS)
        at = draw.randrange(len(text))
        kind = draw.randrange(3)
        if kind == 0:
            texts.append(text[:at])
        elif kind == 1:
            texts.append(text[:at] + draw.choice(pieces) + text[at:])
        else:
            texts.append("".join(draw.choices(pieces, k=draw.randrange(1, 8))))
    return texts
