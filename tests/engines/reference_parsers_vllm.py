"""Run by the interpreter that has vllm: what its own server makes of tokens, read as JSON lines from standard input.

Arguments: the model's folder. A line: {tool, reasoning, tools, ids, eos}; the answer: {content, reasoning, calls,
reasoning_tokens}, or {error}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor  # noqa: E402
from vllm.parser import ParserManager  # noqa: E402
from vllm.tokenizers import get_tokenizer  # noqa: E402

tokenizer = get_tokenizer(sys.argv[1])
classes: dict[tuple[str, str], Any] = {}


def deltas(ids: list[int], skip: bool) -> list[str]:
    """The text each token adds, as the engine's detokenizer says it."""
    from tokenizers.decoders import DecodeStream

    backend = tokenizer._tokenizer if hasattr(tokenizer, "_tokenizer") else tokenizer.backend_tokenizer
    stream = DecodeStream(skip_special_tokens=skip)
    return [stream.step(backend, token) or "" for token in ids]


def answer(case: dict[str, Any]) -> dict[str, Any]:
    pair = case["tool"], case["reasoning"]
    if pair not in classes:
        harmony = bool({"openai", "openai_gptoss"} & set(pair))
        classes[pair] = ParserManager.get_parser(
            pair[0] or None, pair[1] or None, enable_auto_tools=True, is_harmony=harmony, tokenizer=tokenizer
        )
    request = ChatCompletionRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            **({"tools": case["tools"], "tool_choice": "auto"} if case["tools"] else {}),
        }
    )
    parser = classes[pair](tokenizer, request.tools, chat_template_kwargs={}, model_config=None)
    request = parser.adjust_request(request)
    processor = ChatStreamProcessor(request, parser, enable_auto_tools=True, parser_cls=classes[pair])
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    ids = case["ids"]
    texts = deltas(ids, request.skip_special_tokens)
    for token, text in [*zip(ids, texts, strict=True), (case["eos"], "")]:
        last = token == case["eos"]
        delta = processor.step(text, [token], "stop" if last else None, []).delta
        if delta is None:
            continue
        said["content"] += delta.content or ""
        said["reasoning"] += delta.reasoning or ""
        for call in delta.tool_calls or ():
            entry = said["calls"].setdefault(str(call.index), ["", ""])
            if call.function is not None:
                entry[0] = entry[0] or call.function.name or ""
                entry[1] += call.function.arguments or ""
    said["reasoning_tokens"] = parser.count_reasoning_tokens([*ids, case["eos"]])
    return said


for line in sys.stdin:
    try:
        result = answer(json.loads(line))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(result) + "\n")
    answers.flush()
