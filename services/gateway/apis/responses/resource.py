"""Builds the response object in its states, from in progress to completed or failed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.apis.responses.custom_tools import input_of
from services.common.apis.responses.items import Item, compaction_item, item_id, new_id, seal
from services.common.apis.responses.tools import ClientTool
from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.openai.completion_objects import degraded
from services.gateway.apis.responses.schemas import ResponsesRequest, TextOptions
from services.gateway.core.request import Finish, FinishReason, SamplingParams
from services.gateway.operations.logprobs import Naming, chat_logprobs
from services.gateway.operations.output import Counts
from services.gateway.operations.transcript import Block, BlockKind

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How output items are formatted.

    Attributes:
        summary: reasoning is in the summary instead of the content.
        sealed: reasoning is also in `encrypted_content`.
        naming: the names of tokens; None without log-probabilities.
        tools: the client's tools by the name of their function.
    """

    summary: bool = False
    sealed: bool = False
    naming: Naming | None = None
    tools: Mapping[str, ClientTool] = field(default_factory=dict)

    @classmethod
    def of_request(
        cls, fields: ResponsesRequest, tools: Mapping[str, ClientTool], naming: Naming | None
    ) -> OutputOptions:
        """Returns the options that a request selects."""
        reasoning = fields.reasoning
        return cls(
            reasoning is not None and reasoning.as_summary,
            "reasoning.encrypted_content" in fields.includes,
            naming,
            tools,
        )

    def tool(self, block: Block) -> ClientTool:
        """Returns the tool that a block calls; the model may call one that the request does not have."""
        return self.tools.get(block.name) or ClientTool(block.name)


class OutputItem:
    """An output item, made from one block of the output.

    Args:
        item_id: its id without the prefix.
    """

    def __init__(self, block: Block, options: OutputOptions, item_id: str) -> None:
        self.block = block
        self._options = options
        self._tool = options.tool(block)
        self.id = f"{'ctc' if self.custom else _PREFIXES[block.kind]}_{item_id}"

    @property
    def custom(self) -> bool:
        """Whether it is the call of a custom tool."""
        return self._tool.custom

    def in_progress(self) -> dict[str, Any]:
        """Returns the item as it is added, without content."""
        block = self.block
        if block.kind is BlockKind.CALL:
            return self._call("in_progress", "")
        if block.kind is BlockKind.REASONING:
            return self._reasoning("in_progress", None)
        return self._message("in_progress", [])

    def completed(self, status: str) -> dict[str, Any]:
        """Returns the item with all of its content."""
        block = self.block
        if block.kind is BlockKind.CALL:
            return self._call(status, block.text)
        if block.kind is BlockKind.REASONING:
            return self._reasoning(status, block.text)
        return self._message(status, [self.part(block.text)])

    def part(self, text: str) -> dict[str, Any]:
        """Returns the single content part of a message or reasoning item."""
        if self.block.kind is BlockKind.REASONING:
            kind = "summary_text" if self._options.summary else "reasoning_text"
            return {"type": kind, "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs(self.block.tokens), "text": text}

    def logprobs(self, tokens: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns the log-probabilities of some of its tokens; empty if not requested."""
        naming = self._options.naming
        content: list[dict[str, Any]] = chat_logprobs(tokens, naming)["content"] if naming and tokens else []
        return content

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _reasoning(self, status: str, text: str | None) -> dict[str, Any]:
        parts = [] if text is None else [self.part(text)]
        item: dict[str, Any] = {"id": self.id, "type": "reasoning", "status": status}
        item |= {"summary": parts} if self._options.summary else {"summary": [], "content": parts}
        return {**item, "encrypted_content": seal(text or "")} if self._options.sealed else item

    def _call(self, status: str, arguments: str) -> dict[str, Any]:
        tool = self._tool
        content = {"input": input_of(arguments)} if tool.custom else {"arguments": arguments}
        return {
            "id": self.id,
            "type": "custom_tool_call" if tool.custom else "function_call",
            "status": status,
            **content,
            "call_id": self.block.call_id,
            "name": tool.name,
            **({"namespace": tool.namespace} if tool.namespace else {}),
        }


def output_of(blocks: Sequence[Block], options: OutputOptions, response_id: str) -> list[OutputItem]:
    """Returns the items of the output; empty output is one empty message."""
    found = blocks or [Block(BlockKind.TEXT)]
    return [OutputItem(block, options, item_id(response_id, index)) for index, block in enumerate(found)]


def last_status(finish: Finish) -> str:
    """Returns the status of the response's last item."""
    return "incomplete" if finish.reason is FinishReason.LENGTH else "completed"


class Resource:
    """The response object of one request."""

    def __init__(
        self, response_id: str, fields: ResponsesRequest, defaults: SamplingParams, previous: str | None
    ) -> None:
        self.id = response_id
        self._fields = fields
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._request = _request_fields(fields, defaults, previous)

    def in_progress(self) -> dict[str, Any]:
        """Returns the object before any output."""
        return self._object("in_progress", [], None)

    def queued(self) -> dict[str, Any]:
        """Returns the object of a background response before it starts."""
        return self._object("queued", [], None)

    def cancelled(self, items: Sequence[OutputItem], counts: Counts) -> dict[str, Any]:
        """Returns the object of a background response that was cancelled, with its output so far."""
        return self._object("cancelled", [item.completed("incomplete") for item in items], counts)

    def completed(self, items: Sequence[OutputItem], finish: Finish, counts: Counts) -> dict[str, Any]:
        """Returns the final object: completed, or incomplete if the token limit was reached."""
        status = last_status(finish)
        output = [item.completed("completed") for item in items[:-1]] + [item.completed(status) for item in items[-1:]]
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._object(status, output, counts), "incomplete_details": details, **degraded(finish)}

    def failed(self, items: Sequence[OutputItem], error: SluiceError, counts: Counts) -> dict[str, Any]:
        """Returns the object of a response that failed."""
        output = [item.completed("completed") for item in items[:-1]] + [
            item.completed("incomplete") for item in items[-1:]
        ]
        error_object = {
            "code": _error_code(error),
            "message": error.message,
            "param": error.param or None,
        }
        return {**self._object("failed", output, counts), "error": error_object}

    def _object(self, status: str, output: list[dict[str, Any]], counts: Counts | None) -> dict[str, Any]:
        completed_at = int(time.time()) if status == "completed" else None
        return {
            **self._head,
            "status": status,
            "background": bool(self._fields.background),
            "completed_at": completed_at,
            "error": None,
            "incomplete_details": None,
            **self._request,
            "output": output,
            "usage": usage(counts) if counts is not None else None,
        }


def compacted(items: Sequence[Item], blocks: Sequence[Block], counts: Counts) -> dict[str, Any]:
    """Returns the response object: the user's messages, then the summary, which the blocks of the answer contain."""
    summary = "".join(block.text for block in blocks if block.kind is BlockKind.TEXT).strip()
    asked = [item.stored for item in items if item.stored["type"] == "message" and item.stored["role"] == "user"]
    return {
        "id": new_id("resp"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*asked, compaction_item(summary)],
        "usage": usage(counts),
    }


def _error_code(error: SluiceError) -> str:
    if error.http_status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.kind is ErrorKind.INVALID_ARGUMENT else "server_error"


def usage(counts: Counts) -> dict[str, Any]:
    """Returns the usage object."""
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.generated,
    }


def _request_fields(fields: ResponsesRequest, defaults: SamplingParams, previous: str | None) -> dict[str, Any]:
    reasoning = fields.reasoning
    return {
        "model": fields.model,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": previous,
        "conversation": {"id": fields.conversation_id} if fields.conversation_id else None,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "temperature": _first(fields.temperature, defaults.temperature, 1.0),
        "presence_penalty": _first(fields.presence_penalty, 0.0),
        "frequency_penalty": _first(fields.frequency_penalty, 0.0),
        "text": {"format": _text_format(fields.text), "verbosity": (fields.text and fields.text.verbosity) or "medium"},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [_with_null_fields(tool) for tool in fields.tools or ()],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": _first(fields.top_p, defaults.top_p, 1.0),
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _text_format(text: TextOptions | None) -> dict[str, Any]:
    form = text.format if text is not None else None
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {
        "type": "json_schema",
        "name": form.name,
        "description": form.description,
        "schema": form.schema_document,
        "strict": bool(form.strict),
    }


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _with_null_fields(tool: dict[str, Any]) -> dict[str, Any]:
    nulls = {"description": None, "parameters": None, "strict": None} if tool["type"] == "function" else {}
    return {**nulls, **tool}
