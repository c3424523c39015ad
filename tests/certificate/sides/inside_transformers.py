"""Run by the interpreter that has transformers: its `apply_chat_template`, see `side`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import transformers
from transformers import AutoTokenizer

tokenizer = cache(AutoTokenizer.from_pretrained)


def prompt(case: dict[str, Any]) -> dict[str, Any]:
    body = case["body"]
    if any(isinstance(message.get("content"), list) for message in body["messages"]):
        return {"absent": "which form of content a template takes is not documented"}
    continues = body.get("continue_final_message", False)
    ids = tokenizer(case["model"]).apply_chat_template(
        [_documented(message) for message in body["messages"]],
        tools=body.get("tools"),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tokenize=True,
        return_dict=False,
        **({"reasoning_effort": body["reasoning_effort"]} if "reasoning_effort" in body else {}),
        **body.get("chat_template_kwargs", {}),
    )
    return {"ids": list(ids)}


def _documented(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the form that transformers documents: content is a text, arguments are objects."""
    message = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        message["tool_calls"] = [{**call, "function": _parsed(call["function"])} for call in message["tool_calls"]]
    return message


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except json.JSONDecodeError:
        return function


VERSION = f"transformers {transformers.__version__}"
APIS = ("chat",)
ANSWERERS = {"prompt": prompt}
