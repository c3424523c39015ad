"""Request bodies of up to 10 MiB that must be refused for less than it costs to serve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

MIB = 1 << 20
MOST = 10 * MIB - 100
"""About the most bytes that a gateway without flags takes."""
USER = {"role": "user", "content": "hi"}

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

OVER_BUDGET = "budget_exceeded"


@dataclass(frozen=True, slots=True)
class Hostile:
    """A body.

    Attributes:
        path: of the endpoint.
        make: its bytes; made when they are needed, because all of them together are large.
        param: what the name of the refused field begins with; empty: no field is named.
        code: of the refusal.
    """

    path: str
    make: Callable[[], bytes]
    param: str = ""
    code: str = "invalid_value"


def chat(**fields: Any) -> bytes:
    """A chat completion."""
    return orjson.dumps({"model": "m", "messages": [USER], **fields})


def response(**fields: Any) -> bytes:
    """A request of the Responses API."""
    return orjson.dumps({"model": "m", "input": "hi", **fields})


def message(**fields: Any) -> bytes:
    """A request of the Messages API."""
    return orjson.dumps({"model": "m", "max_tokens": 5, "messages": [USER], **fields})


def tool(name: str, parameters: Any) -> dict[str, Any]:
    """A function as chats describe it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def repeated(head: bytes, element: bytes, size: int, tail: bytes) -> bytes:
    """As many elements as come to `size` bytes, separated by commas."""
    return head + b",".join([element] * (size // (len(element) + 1))) + tail


def named(prefix: str, count: int, value: Any = 0) -> dict[str, Any]:
    """An object of so many members."""
    return {f"{prefix}{index}": value for index in range(count)}


def under_a_long_name(length: int, children: int) -> dict[str, Any]:
    """A schema of so many parts below a property with a name of so many characters."""
    return {"properties": {"n" * length: {"properties": named("c", children, {})}}}


def set_patterns(count: int) -> dict[str, Any]:
    """A schema of different patterns, each of which takes Python seconds to compile."""
    return {"properties": {f"p{i}": {"pattern": f"{i}" + "[\x01-\U0010ffff]" * 800} for i in range(count)}}


def calls(count: int) -> list[dict[str, Any]]:
    """A turn with so many calls, and one with their results."""
    used = [{"type": "tool_use", "id": f"call{index}", "name": "f", "input": {}} for index in range(count)]
    results = [{"type": "tool_result", "tool_use_id": f"call{index}", "content": ""} for index in range(count)]
    return [USER, {"role": "assistant", "content": used}, {"role": "user", "content": results}]


_WIDE = {"properties": named("p", 80_000, {})}
_MESSAGES = b'{"model":"m","messages":['
_BLOCKS = [{"type": "text", "text": "x"}] * 35_000
_PARTS = [{"type": "input_text", "text": "x"}] * 35_000

COUNTED = {
    "zeros as messages": Hostile(CHAT, lambda: repeated(_MESSAGES, b"0", MOST, b"]}"), "", OVER_BUDGET),
    "lists as messages": Hostile(CHAT, lambda: repeated(_MESSAGES, b"[]", MOST, b"]}"), "", OVER_BUDGET),
    "objects as messages": Hostile(CHAT, lambda: repeated(_MESSAGES, b"{}", MOST, b"]}"), "", OVER_BUDGET),
    "nested lists as messages": Hostile(CHAT, lambda: repeated(_MESSAGES, b"[[[[0]]]]", MOST, b"]}"), "", OVER_BUDGET),
    "strings as messages": Hostile(CHAT, lambda: repeated(_MESSAGES, b'"x"', MOST, b"]}"), "", OVER_BUDGET),
    "half a million fields": Hostile(CHAT, lambda: chat(**named("field", 500_000)), "", OVER_BUDGET),
    "token ids and true": Hostile(
        COMPLETIONS, lambda: repeated(b'{"model":"m","prompt":[', b"7", MOST, b",true]}"), "", OVER_BUDGET
    ),
    "texts to embed": Hostile(
        EMBEDDINGS, lambda: repeated(b'{"model":"m","input":[', b'"x"', MOST, b"]}"), "", OVER_BUDGET
    ),
    "lists as input": Hostile(
        RESPONSES, lambda: repeated(b'{"model":"m","input":[', b"[]", MOST, b"]}"), "", OVER_BUDGET
    ),
    "strings as tokens": Hostile(
        "/detokenize", lambda: repeated(b'{"model":"m","tokens":[', b'"x"', MOST, b"]}"), "", OVER_BUDGET
    ),
}
"""Refused before they are parsed."""

LONG = {
    "unknown fields": Hostile(CHAT, lambda: chat(**named("f" + "0" * 90, 90_000)), "f" + "0" * 63, "unknown_parameter"),
    "one long unknown field": Hostile(CHAT, lambda: chat(**{"f" * 9 * MIB: 0}), "f" * 64, "unknown_parameter"),
    "unknown fields of stream_options": Hostile(
        CHAT,
        lambda: chat(stream=True, stream_options=named("f", 95_000)),
        "stream_options.f0",
        "unknown_parameter",
    ),
    "unknown fields of nvext": Hostile(CHAT, lambda: chat(nvext=named("f", 95_000)), "nvext.f0", "unknown_parameter"),
    "logit_bias": Hostile(CHAT, lambda: chat(logit_bias=named("", 95_000, 1)), "logit_bias"),
    "metadata": Hostile(CHAT, lambda: chat(metadata=named("name", 95_000, "x" * 80)), "metadata"),
    "metadata of numbers": Hostile(CHAT, lambda: chat(metadata=named("name", 95_000)), "metadata"),
    "stop": Hostile(CHAT, lambda: chat(stop=["stop here"] * 180_000), "stop"),
    "stop_token_ids": Hostile(CHAT, lambda: chat(stop_token_ids=[1] * 1_900_000), "stop_token_ids"),
    "stop_token_ids of texts": Hostile(CHAT, lambda: chat(stop_token_ids=["xxxx"] * 180_000), "stop_token_ids"),
    "allowed_token_ids below 0": Hostile(CHAT, lambda: chat(allowed_token_ids=[-1] * 131_072), "allowed_token_ids[0]"),
    "bad_words": Hostile(CHAT, lambda: chat(bad_words=["word"] * 180_000), "bad_words"),
    "tools of zeros": Hostile(CHAT, lambda: chat(tools=[0] * 1_900_000), "tools"),
    "messages": Hostile(CHAT, lambda: chat(messages=[USER] * 35_000), "messages", OVER_BUDGET),
    "parts of a message": Hostile(
        CHAT, lambda: chat(messages=[{"role": "user", "content": _BLOCKS}]), "messages[0].content", OVER_BUDGET
    ),
    "documents": Hostile(CHAT, lambda: chat(documents=[0] * 1_900_000), "documents", OVER_BUDGET),
    "chat_template_kwargs": Hostile(
        CHAT, lambda: chat(chat_template_kwargs=named("k", 95_000)), "chat_template_kwargs", OVER_BUDGET
    ),
    "vllm_xargs": Hostile(CHAT, lambda: chat(vllm_xargs=named("k", 95_000)), "vllm_xargs", OVER_BUDGET),
    "guided_choice": Hostile(CHAT, lambda: chat(guided_choice=["choice"] * 180_000), "guided_choice"),
    "modalities": Hostile(CHAT, lambda: chat(modalities=["text"] * 180_000), "modalities"),
    "token_data of texts": Hostile(CHAT, lambda: chat(nvext={"token_data": ["x"] * 130_000}), "nvext.token_data[0]"),
    "prompts": Hostile(
        COMPLETIONS, lambda: orjson.dumps({"model": "m", "prompt": ["xxx"] * 180_000}), "prompt", OVER_BUDGET
    ),
    "empty prompts": Hostile(
        COMPLETIONS, lambda: orjson.dumps({"model": "m", "prompt": [[]] * 150_000}), "prompt", OVER_BUDGET
    ),
    "inputs": Hostile(EMBEDDINGS, lambda: orjson.dumps({"model": "m", "input": ["xxx"] * 180_000}), "input"),
    "inputs of ids": Hostile(EMBEDDINGS, lambda: orjson.dumps({"model": "m", "input": [[100_000]] * 150_000}), "input"),
    "tokens of texts": Hostile(
        "/detokenize", lambda: orjson.dumps({"model": "m", "tokens": ["xxx"] * 180_000}), "tokens[0]"
    ),
    "items": Hostile(RESPONSES, lambda: response(input=[USER] * 35_000), "input", OVER_BUDGET),
    "items of zeros": Hostile(RESPONSES, lambda: response(input=[0] * 1_900_000), "input", OVER_BUDGET),
    "parts of an item": Hostile(
        RESPONSES, lambda: response(input=[{"role": "user", "content": _PARTS}]), "input[0].content", OVER_BUDGET
    ),
    "allowed tools": Hostile(
        RESPONSES,
        lambda: response(
            tools=[{"type": "function", "name": f"f{index}"} for index in range(100)],
            tool_choice={
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f99"}] * 30_000,
            },
        ),
        "tool_choice.tools",
        OVER_BUDGET,
    ),
    "include": Hostile(RESPONSES, lambda: response(include=["nothing"] * 180_000), "include"),
    "messages of Anthropic": Hostile(MESSAGES, lambda: message(messages=[USER] * 35_000), "messages", OVER_BUDGET),
    "content blocks": Hostile(
        MESSAGES,
        lambda: message(messages=[{"role": "user", "content": _BLOCKS}]),
        "messages.0.content",
        OVER_BUDGET,
    ),
    "blocks of the system": Hostile(MESSAGES, lambda: message(system=_BLOCKS), "system", OVER_BUDGET),
    "stop_sequences": Hostile(MESSAGES, lambda: message(stop_sequences=["xxx"] * 180_000), "stop_sequences"),
}
"""Refused for the length of a list or object, before its elements are looked at, or for the first element."""

CONSTRAINTS = {
    "a long name above many": Hostile(
        CHAT,
        lambda: chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": under_a_long_name(MIB, 30_000)},
            }
        ),
        "response_format.json_schema.schema",
        OVER_BUDGET,
    ),
    "a wide schema": Hostile(CHAT, lambda: chat(guided_json=_WIDE), "guided_json", OVER_BUDGET),
    "a schema as text": Hostile(
        CHAT,
        lambda: chat(guided_json=repeated(b'{"anyOf":[', b"{}", 9 * MIB, b"]}").decode()),
        "guided_json",
        OVER_BUDGET,
    ),
    "a shorter schema as text": Hostile(
        CHAT,
        lambda: chat(guided_json=repeated(b'{"anyOf":[', b"{}", MIB - 100, b"]}").decode()),
        "guided_json",
        OVER_BUDGET,
    ),
    "values of an enum": Hostile(
        CHAT, lambda: chat(json_schema={"enum": list(range(300_000))}), "json_schema", OVER_BUDGET
    ),
    "parameters of many tools": Hostile(
        CHAT,
        lambda: chat(tools=[tool(f"f{index}", {"properties": named("p", 95, {})}) for index in range(900)]),
        "tools[",
        OVER_BUDGET,
    ),
    "parameters of a demanded call": Hostile(
        CHAT,
        lambda: chat(tools=[tool("f", under_a_long_name(2 * MIB, 10_000))], tool_choice="required"),
        "tools[0].function.parameters",
        OVER_BUDGET,
    ),
    "parameters to be tokenized": Hostile(
        "/tokenize",
        lambda: orjson.dumps({"model": "m", "messages": [USER], "tools": [tool("f", _WIDE)]}),
        "tools[0].function.parameters",
        OVER_BUDGET,
    ),
    "parameters of the Responses API": Hostile(
        RESPONSES,
        lambda: response(tools=[{"type": "function", "name": "f", "parameters": _WIDE}]),
        "tools[0].parameters",
        OVER_BUDGET,
    ),
    "an input_schema": Hostile(
        MESSAGES,
        lambda: message(tools=[{"name": "f", "input_schema": {"type": "object", **_WIDE}}]),
        "tools.0.input_schema",
        OVER_BUDGET,
    ),
    "a format of the Responses API": Hostile(
        RESPONSES,
        lambda: response(text={"format": {"type": "json_schema", "name": "n", "schema": _WIDE}}),
        "text.format.schema",
        OVER_BUDGET,
    ),
    "a format of the Messages API": Hostile(
        MESSAGES,
        lambda: message(output_config={"format": {"type": "json_schema", "schema": _WIDE}}),
        "output_config.format.schema",
        OVER_BUDGET,
    ),
    "one pattern": Hostile(CHAT, lambda: chat(guided_regex="[\x01-\U0010ffff]" * 240_000), "guided_regex", OVER_BUDGET),
    "patterns of a schema": Hostile(CHAT, lambda: chat(guided_json=set_patterns(200)), "guided_json", OVER_BUDGET),
    "patterns of properties": Hostile(
        CHAT, lambda: chat(json_schema={"patternProperties": named("x" * 90, 10_000, {})}), "json_schema", OVER_BUDGET
    ),
    "patterns of a tool": Hostile(
        CHAT, lambda: chat(tools=[tool("f", set_patterns(200))]), "tools[0].function.parameters", OVER_BUDGET
    ),
    "a structural tag": Hostile(
        CHAT,
        lambda: chat(response_format={"type": "structural_tag", "structures": [{"begin": "x" * 20}] * 35_000}),
        "response_format",
        OVER_BUDGET,
    ),
    "a grammar": Hostile(CHAT, lambda: chat(guided_grammar='"a" | ' * MIB), "guided_grammar", OVER_BUDGET),
    "texts of a choice": Hostile(CHAT, lambda: chat(guided_choice=["x" * 9_000] * 1_000), "guided_choice", OVER_BUDGET),
}
"""Refused for the schemas, patterns or grammars of all fields together."""

GROWING: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "calls and their results": (MESSAGES, lambda count: message(messages=calls(count))),
    "turns of the assistant": (
        MESSAGES,
        lambda count: message(messages=[USER, *[{"role": "assistant", "content": "x" * 900}] * count, USER]),
    ),
    "turns of the user": (MESSAGES, lambda count: message(messages=[USER] * count)),
    "items of reasoning": (
        RESPONSES,
        lambda count: response(
            input=[
                *[{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 900}]}] * count,
                USER,
            ]
        ),
    ),
    "system messages": (
        RESPONSES,
        lambda count: response(input=[*[{"role": "system", "content": "x" * 900}] * count, USER]),
    ),
}
"""Bodies that are served, by their number of parts: the work may grow with it, but not with its square."""
