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
from tokenizers.decoders import DecodeStream
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer


class Parsers:
    """vLLM's parsers for one model.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: str) -> None:
        self._tokenizer = get_tokenizer(folder)
        self._classes: dict[tuple[str, str], Any] = {}

    def _deltas(self, ids: list[int], skip: bool) -> list[str]:
        """The text each token adds, as the engine's detokenizer says it."""
        backend = getattr(self._tokenizer, "_tokenizer", None) or self._tokenizer.backend_tokenizer
        stream = DecodeStream(skip_special_tokens=skip)
        return [stream.step(backend, token) or "" for token in ids]

    def _class(self, pair: tuple[str, str]) -> Any:
        if pair not in self._classes:
            self._classes[pair] = ParserManager.get_parser(
                pair[0] or None,
                pair[1] or None,
                enable_auto_tools=True,
                is_harmony=bool({"openai", "openai_gptoss"} & set(pair)),
                tokenizer=self._tokenizer,
            )
        return self._classes[pair]

    def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        """What the server sends for a case; its "finish" is the engine's reason, "stop" if unset."""
        parser_class = self._class((case["tool"], case["reasoning"]))
        kwargs = case.get("kwargs") or {}
        request = ChatCompletionRequest.model_validate(
            {
                "model": "m",
                "chat_template_kwargs": kwargs,
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                **({"tools": case["tools"], "tool_choice": "auto"} if case["tools"] else {}),
            }
        )
        parser = parser_class(self._tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=None)
        request = parser.adjust_request(request)
        processor = ChatStreamProcessor(request, parser, enable_auto_tools=True, parser_cls=parser_class)
        said: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
        reason = case.get("finish", "stop")
        steps = [
            (text, [token])
            for token, text in zip(case["ids"], self._deltas(case["ids"], request.skip_special_tokens), strict=True)
        ]
        # The end-of-sequence token comes without text; an answer that is cut ends with its last token.
        steps += [("", [case["eos"]])] if reason == "stop" or not steps else []
        for place, (text, tokens) in enumerate(steps, 1):
            step = processor.step(text, tokens, reason if place == len(steps) else None, [])
            said["finish"] = step.finish_reason
            delta = step.delta
            if delta is None:
                continue
            said["content"] += delta.content or ""
            said["reasoning"] += delta.reasoning or ""
            for call in delta.tool_calls or ():
                entry = said["calls"].setdefault(str(call.index), ["", ""])
                if call.function is not None:
                    entry[0] = entry[0] or call.function.name or ""
                    entry[1] += call.function.arguments or ""
        said["reasoning_tokens"] = parser.count_reasoning_tokens([token for _, tokens in steps for token in tokens])
        return said


def main() -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parsers = Parsers(sys.argv[1])
    for line in sys.stdin:
        try:
            result = parsers.answer(json.loads(line))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
