"""The response object, as it is answered, streamed and kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import ErrorKind, SluiceError
from services.gateway.apis.common.transcript import Block, Counts, Kind
from services.gateway.apis.openai.completion_objects import degraded
from services.gateway.apis.openai.logprobs import Naming, chat_logprobs
from services.gateway.apis.responses.items import new_id, seal
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.core.request import Finish, FinishReason, SamplingParams

_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}


@dataclass(frozen=True, slots=True)
class Shown:
    """How items are shown.

    Attributes:
        summary: reasoning stands in the summary, not in the content.
        sealed: reasoning also stands in `encrypted_content`.
        naming: what tokens are called, where their log-probabilities are shown.
    """

    summary: bool = False
    sealed: bool = False
    naming: Naming | None = None

    @classmethod
    def by(cls, fields: ResponsesRequest, naming: Naming | None) -> Shown:
        """As a request asks."""
        reasoning = fields.reasoning
        return cls(
            reasoning is not None and reasoning.as_summary, "reasoning.encrypted_content" in fields.includes, naming
        )


class OutputItem:
    """One block of the answer as an item."""

    def __init__(self, block: Block, shown: Shown) -> None:
        self.id = new_id(_PREFIXES[block.kind])
        self.block = block
        self._shown = shown

    def begun(self) -> dict[str, Any]:
        """As it is added, with nothing in it."""
        block = self.block
        if block.kind is Kind.CALL:
            return self._call("in_progress", "")
        if block.kind is Kind.REASONING:
            return self._reasoning("in_progress", None)
        return self._message("in_progress", [])

    def whole(self, status: str) -> dict[str, Any]:
        """As it is when it is done."""
        block = self.block
        if block.kind is Kind.CALL:
            return self._call(status, block.said)
        if block.kind is Kind.REASONING:
            return self._reasoning(status, block.said)
        return self._message(status, [self.part(block.said)])

    def part(self, text: str) -> dict[str, Any]:
        """The one part of its content, of text or of reasoning."""
        if self.block.kind is Kind.REASONING:
            kind = "summary_text" if self._shown.summary else "reasoning_text"
            return {"type": kind, "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs(self.block.tokens), "text": text}

    def logprobs(self, tokens: Sequence[Any]) -> list[dict[str, Any]]:
        """The log-probabilities of some of its tokens; none where none were asked for."""
        naming = self._shown.naming
        content: list[dict[str, Any]] = chat_logprobs(tokens, naming)["content"] if naming and tokens else []
        return content

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _reasoning(self, status: str, text: str | None) -> dict[str, Any]:
        parts = [] if text is None else [self.part(text)]
        said: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status}
        said |= {"summary": parts} if self._shown.summary else {"summary": [], "content": parts}
        return {**said, "encrypted_content": seal(text or "") if self._shown.sealed else None}

    def _call(self, status: str, arguments: str) -> dict[str, Any]:
        block = self.block
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "arguments": arguments,
            "call_id": block.call_id,
            "name": block.name,
        }


def output_of(blocks: Sequence[Block], shown: Shown) -> list[OutputItem]:
    """The items of an answer; one of no words at all is a message without any."""
    return [OutputItem(block, shown) for block in blocks or [Block(Kind.TEXT)]]


def last_status(finish: Finish) -> str:
    """Of the last item, once the answer has ended."""
    return "incomplete" if finish.reason is FinishReason.LENGTH else "completed"


class Resource:
    """One response from beginning to end."""

    def __init__(self, response_id: str, fields: ResponsesRequest, defaults: SamplingParams, prior: str | None) -> None:
        self.id = response_id
        self._fields = fields
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._request = _said_in_request(fields, defaults, prior)

    def in_progress(self) -> dict[str, Any]:
        """Before anything is said."""
        return self._made("in_progress", [], None)

    def ended(self, items: Sequence[OutputItem], finish: Finish, counts: Counts) -> dict[str, Any]:
        """Completed, or incomplete when it ran out of tokens."""
        status = last_status(finish)
        output = [item.whole("completed") for item in items[:-1]] + [item.whole(status) for item in items[-1:]]
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._made(status, output, counts), "incomplete_details": details, **degraded(finish)}

    def failed(self, items: Sequence[OutputItem], error: SluiceError, counts: Counts) -> dict[str, Any]:
        """Broken off."""
        output = [item.whole("completed") for item in items[:-1]] + [item.whole("incomplete") for item in items[-1:]]
        code = {ErrorKind.OVERLOADED: "rate_limit_exceeded", ErrorKind.INVALID_ARGUMENT: "invalid_prompt"}
        told = {
            "code": code.get(error.kind, "server_error"),
            "message": error.message,
            "param": error.param or None,
        }
        return {**self._made("failed", output, counts), "error": told}

    def _made(self, status: str, output: list[dict[str, Any]], counts: Counts | None) -> dict[str, Any]:
        done = int(time.time()) if status == "completed" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": done,
            "error": None,
            "incomplete_details": None,
            **self._request,
            "output": output,
            "usage": usage(counts) if counts is not None else None,
        }


def usage(counts: Counts) -> dict[str, Any]:
    """The usage object."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.generated,
    }


def _said_in_request(fields: ResponsesRequest, defaults: SamplingParams, prior: str | None) -> dict[str, Any]:
    reasoning = fields.reasoning
    form = fields.text.format if fields.text is not None else None
    shown_form = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "model": fields.model,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": prior,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": fields.temperature if fields.temperature is not None else defaults.temperature,
        "text": {"format": shown_form, "verbosity": "medium"},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [_shown_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p if fields.top_p is not None else defaults.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}
