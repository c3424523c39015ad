"""Conversations through the client library: their items, and responses that continue them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest
from openai.types.conversations import ConversationItem
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent, ResponseStreamEvent

from tests.support.servers.suite import Suite
from tests.support.waiting import until


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def kinds(client: openai.OpenAI, conversation_id: str) -> list[str]:
    return [item.type for item in client.conversations.items.list(conversation_id, order="asc", limit=100)]


def texts(items: Iterable[ConversationItem]) -> list[str]:
    """Of users' messages of one part each."""
    found = []
    for item in items:
        assert item.type == "message"
        (part,) = item.content
        assert part.type == "input_text"
        found.append(part.text)
    return found


def last_response(stream: openai.Stream[ResponseStreamEvent]) -> Response:
    *_, last = stream
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    return last.response


def test_a_conversation_is_created_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "a"}, items=[user("Hi.")])
    assert made.metadata == {"topic": "a"}
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"}
    assert client.conversations.retrieve(made.id) == changed
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for missing in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(openai.NotFoundError):
            missing(made.id)


def test_items_of_a_conversation_are_added_read_and_removed(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    added = client.conversations.items.create(made.id, items=[user("One."), user("Two."), user("Three.")])
    assert texts(added.data) == ["One.", "Two.", "Three."]
    second = added.data[1]
    assert second.id is not None
    assert client.conversations.items.retrieve(second.id, conversation_id=made.id) == second
    assert client.conversations.items.delete(second.id, conversation_id=made.id).id == made.id
    first_page = client.conversations.items.list(made.id, limit=1)
    assert texts(first_page) == ["Three.", "One."]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(second.id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.delete(second.id, conversation_id=made.id)
    known: Any = added.data[0].model_dump(exclude_none=True)
    with pytest.raises(openai.BadRequestError) as twice:
        client.conversations.items.create(made.id, items=[known])
    assert twice.value.param == "items[0].id"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_continue_a_conversation(client: openai.OpenAI, stream: bool) -> None:
    made = client.conversations.create(items=[user("My name is Alice.")])
    lengths = []
    for turn in range(3):
        body: Any = {"model": "tekken", "conversation": made.id, "input": f"Turn {turn}.", "max_output_tokens": 5}
        response: Response
        if stream:
            response = last_response(client.responses.create(**body, stream=True))
        else:
            response = client.responses.create(**{**body, "conversation": {"id": made.id}})
        assert response.conversation is not None
        assert response.conversation.id == made.id
        assert response.usage is not None
        lengths.append(response.usage.input_tokens)
    assert lengths == sorted(set(lengths))
    assert kinds(client, made.id) == ["message"] * 7


@pytest.mark.parametrize("stream", [False, True])
def test_unstored_response_reads_its_conversation_and_adds_nothing(client: openai.OpenAI, stream: bool) -> None:
    made = client.conversations.create(items=[user("My name is Alice.")])
    body: Any = {"model": "tekken", "conversation": made.id, "input": "Hi.", "max_output_tokens": 5, "store": False}
    final: Response
    if stream:
        final = last_response(client.responses.create(**body, stream=True))
    else:
        final = client.responses.create(**body, stream=False)
    assert final.conversation is not None
    assert final.conversation.id == made.id
    alone: Response = client.responses.create(**{**body, "conversation": None})
    assert final.usage is not None
    assert alone.usage is not None
    assert final.usage.input_tokens > alone.usage.input_tokens
    assert kinds(client, made.id) == ["message"]


async def test_a_background_response_continues_a_conversation(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    client.responses.create(model="tekken", conversation=made.id, input="Hi.", background=True, max_output_tokens=4)
    await until(lambda: len(kinds(client, made.id)) == 2)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("conversations", {"items": [user("a")] * 21}, 400, "items"),
        ("conversations", {"items": [{"type": "odd"}]}, 400, "items[0].type"),
        ("conversations", {"metadata": {"a": 1}}, 400, "metadata.a"),
        ("conversations", {"colour": 1}, 400, "colour"),
        ("conversations/conv_unknown", {"metadata": {}}, 404, "conversation_id"),
        ("conversations/conv_unknown/items", {"items": []}, 404, "conversation_id"),
        ("responses", {"model": "tekken", "input": "a", "conversation": "conv_unknown"}, 404, "conversation"),
        ("responses", {"model": "tekken", "input": "a", "conversation": {"id": 5}}, 400, None),
        (
            "responses",
            {"model": "tekken", "input": "a", "conversation": "conv_a", "previous_response_id": "resp_a"},
            400,
            "conversation",
        ),
    ],
)
def test_wrong_requests_name_their_field(suite: Suite, path: str, body: Any, status: int, param: str | None) -> None:
    refused = httpx.post(f"{suite.url}/v1/{path}", json=body, timeout=30)
    assert refused.status_code == status, refused.text
    assert param is None or refused.json()["error"]["param"] == param


def test_a_response_is_not_a_conversation_and_neither_the_other(suite: Suite, client: openai.OpenAI) -> None:
    response = client.responses.create(model="tekken", input="Hi.", max_output_tokens=4)
    made = client.conversations.create()
    assert httpx.get(f"{suite.url}/v1/conversations/{response.id}").status_code == 404
    assert httpx.get(f"{suite.url}/v1/responses/{made.id}").status_code == 404
    assert httpx.delete(f"{suite.url}/v1/conversations/{response.id}").status_code == 404
    assert httpx.delete(f"{suite.url}/v1/responses/{made.id}").status_code == 404
    assert client.responses.retrieve(response.id).id == response.id
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tekken", input="Hi.", previous_response_id=made.id)
