"""Bodies of every API at the picker: which are read, and which are refused or routed by load alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.apis.prompts import TextPrompt, TokenPrompt
from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.router.scheduling.request_bodies import Api, ReadBody, RefusedBody, api_of, read_prompt
from tests.support.oracles.errors import raises_error


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/prefix/v1/completions?x=1", Api.COMPLETION),
        ("/v1/responses/", Api.RESPONSES),
        ("/v1/messages", Api.MESSAGES),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/v1/models", None),
        ("", None),
    ],
)
def test_api_follows_from_the_path(path: str, api: Api | None) -> None:
    assert api_of(path) is api


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.RESPONSES])
def test_broken_image_of_an_agent_is_refused(api: Api) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "%"}
    parts = {
        Api.MESSAGES: {"type": "image", "source": source},
        Api.RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,%"},
    }
    turns = [{"role": "user", "content": [parts[api]]}]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="invalid_media"):
        read_prompt({"messages" if api is Api.MESSAGES else "input": turns}, api)


def test_several_prompts_or_inputs_are_one_of_their_total_length() -> None:
    assert read_prompt({"input": ["one", "two"]}, Api.EMBEDDINGS) == ReadBody(TextPrompt("onetwo"))
    assert read_prompt({"prompt": ["one", "two"]}, Api.COMPLETION) == ReadBody(TextPrompt("onetwo"))
    assert read_prompt({"prompt": [[1], [2, 3]]}, Api.COMPLETION) == ReadBody(TokenPrompt(pack_u32([1, 2, 3])))
    for mixed in (["one", [2]], [1, "two"], [[1], 2]):
        with pytest.raises(SluiceError):
            read_prompt({"prompt": mixed}, Api.COMPLETION)


def test_body_without_a_prompt_is_none() -> None:
    assert read_prompt({"model": "m"}, None) is None


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"messages": {}}, Api.MESSAGES),
        ({"messages": ["x"]}, Api.MESSAGES),
        ({"messages": []}, Api.MESSAGES),
        ({"input": [1]}, Api.RESPONSES),
        ({"input": 5}, Api.RESPONSES),
        ({"input": {}}, Api.EMBEDDINGS),
    ],
)
def test_malformed_prompt_is_rejected(body: dict[str, Any], api: Api) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        read_prompt(body, api)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "input", "id", "name"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["messages", "input", "system", "tools", "prompt"]), _JSON), st.sampled_from([*Api])
)
def test_any_body_is_read_or_rejected_by_a_typed_error(body: dict[str, Any], api: Api) -> None:
    try:
        read: object = read_prompt(body, api)
    except SluiceError as error:
        read = error.kind
    assert read is None or isinstance(read, ReadBody | RefusedBody) or read is ErrorKind.INVALID_ARGUMENT


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, Api.RESPONSES),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, Api.RESPONSES),
        ({"input": [{"type": "input_audio", "input_audio": {"data": "QUJD", "format": "aac"}}]}, Api.RESPONSES),
        ({"input": "a", "previous_response_id": "resp_1"}, Api.RESPONSES),
        ({"input": "a", "conversation": {"id": "conv_1"}}, Api.RESPONSES),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, Api.RESPONSES),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, Api.RESPONSES),
        ({"input": [{"type": "new_kind"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, Api.MESSAGES),
        ({"messages": [USER], "tools": [{"type": "new_tool", "name": "t"}]}, Api.MESSAGES),
        ({"messages": [{"role": "robot", "content": "a"}]}, Api.MESSAGES),
    ],
)
def test_body_that_the_gateway_refuses_is_not_refused_by_the_picker(body: dict[str, Any], api: Api | None) -> None:
    read = read_prompt(body, api, 400)
    assert isinstance(read, RefusedBody)
    assert (read.error.kind, read.size) == (ErrorKind.INVALID_ARGUMENT, 400)
