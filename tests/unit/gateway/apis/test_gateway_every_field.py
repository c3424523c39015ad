"""Every field of every endpoint with wrong values of every type: a request, or an error that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from services.gateway.apis.openai.embedding_schemas import EmbeddingRequest
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.token_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.schemas import InputTokensRequest, ResponsesRequest
from tests.support.data.bodies import BUDGETS
from tests.unit.gateway.apis.test_gateway_anthropic_fields import request_of as message_request
from tests.unit.gateway.apis.test_gateway_responses_fields import TOOL
from tests.unit.gateway.apis.test_gateway_responses_fields import request_of as response_request

USER = {"role": "user", "content": "hi"}
VALUES: list[Any] = [
    *[None, True, 0, -1, 2**70, 1.5, -1e300, float("inf"), "", "x", "x" * 300_000],
    *[[], [None], [""], ["x"], [-1], [1.5], [[]], [{"type": "web_search"}], [{"role": "user"}]],
    *[{}, {"x": None}, {"type": "x"}, {"type": "enabled"}, {"type": "function"}, {"type": "tool", "name": 5}],
    *[{"1": 1e9}, {"99999999999": 1}, {"x": {"x": {"x": []}}}],
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-3, 3) | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)


def openai_request(kind: type[BaseModel], body: dict[str, Any]) -> object:
    fields = check(kind, body, BUDGETS)
    if isinstance(fields, ChatCompletionRequest):
        return chat_request(body, fields, "r", 8, BUDGETS, forces_calls=True)
    if isinstance(fields, CompletionRequest):
        return completion_requests(fields, "r", 8, BUDGETS)
    return fields


@dataclass(frozen=True)
class Endpoint:
    fields: type[BaseModel]
    body: dict[str, Any]
    translate: Callable[[type[BaseModel], dict[str, Any]], object]

    @property
    def names(self) -> list[str]:
        return [field.alias or name for name, field in self.fields.model_fields.items()]

    def error(self, body: dict[str, Any]) -> SluiceError | None:
        """Returns the typed error for a body, None for a valid one."""
        try:
            self.translate(self.fields, body)
        except SluiceError as error:
            return error
        return None


ENDPOINTS = [
    Endpoint(ChatCompletionRequest, {"model": "m", "messages": [USER]}, openai_request),
    Endpoint(CompletionRequest, {"model": "m", "prompt": "hi"}, openai_request),
    Endpoint(EmbeddingRequest, {"model": "m", "input": "hi"}, openai_request),
    Endpoint(TokenizeRequest, {"model": "m", "prompt": "hi"}, openai_request),
    Endpoint(DetokenizeRequest, {"model": "m", "tokens": [1]}, openai_request),
    Endpoint(MessagesRequest, {"model": "m", "max_tokens": 2000, "messages": [USER]}, message_request),
    Endpoint(CountTokensRequest, {"model": "m", "messages": [USER]}, message_request),
    Endpoint(ResponsesRequest, {"model": "m", "input": "hi", "tools": [TOOL]}, response_request),
    Endpoint(InputTokensRequest, {"model": "m", "input": "hi", "tools": [TOOL]}, response_request),
]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.fields.__name__)
def test_any_field_with_a_wrong_value_raises_an_error_that_names_it(endpoint: Endpoint) -> None:
    for field in endpoint.names:
        for value in VALUES:
            body = {**endpoint.body, field: value}
            if field in ("prompt_embeds", "messages") and value is not None:
                body.pop("prompt", None)
            error = endpoint.error(body)
            if error is not None:
                assert error.kind is ErrorKind.INVALID_ARGUMENT
                assert error.param == field or error.param.startswith((f"{field}.", f"{field}[")), (value, error)
                assert error.param.rpartition(".")[2] in error.message
                assert "\n" not in error.message
                assert len(error.message) < 500
                if endpoint.translate is message_request:
                    assert error.message.startswith(field)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ENDPOINTS), st.data())
def test_any_combination_of_fields_is_a_request_or_a_typed_error(endpoint: Endpoint, data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(endpoint.names), JSON | st.sampled_from(VALUES)))
    error = endpoint.error({**endpoint.body, **fields})
    assert error is None or (error.kind is ErrorKind.INVALID_ARGUMENT and error.param)
