"""Chains of responses and the prefix cache: each turn runs where the blocks of the whole chain are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.clients.response_socket import response_socket
from tests.support.servers.suite import Suite
from tests.support.waiting import until

TURNS = 6
WORDS = "The gateway renders the whole chain again, and the router finds its blocks. " * 40
Turn = Callable[[dict[str, Any]], dict[str, Any]]


async def check_chain(turn: Turn, client: openai.OpenAI, link: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Runs a chain beside other conversations, and checks the cached tokens of each turn."""
    more = link({})
    before = 0
    for number in range(TURNS):
        response = turn({"input": f"Turn {number}. {WORDS}", "max_output_tokens": 8, **more})
        prompt = response["usage"]["input_tokens"]
        cached = response["usage"]["input_tokens_details"]["cached_tokens"]
        assert prompt > before
        assert cached >= before * 0.9, f"turn {number}: {cached} of {before} tokens are cached"
        before, more = prompt, link(response)
        other = client.responses.create(model="tekken", input=f"Other {number}. {WORDS}", max_output_tokens=8)
        await until(partial(_is_cached, client, other.id))


def _is_cached(client: openai.OpenAI, response_id: str) -> bool:
    """Whether the router knows the blocks of a response: then it knows those of earlier ones too."""
    again = client.responses.create(
        model="tekken", input="More.", previous_response_id=response_id, max_output_tokens=1, store=False
    )
    return again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("how", ["previous_response_id", "conversation"])
async def test_turns_over_http_run_where_the_blocks_of_their_chain_are(client: openai.OpenAI, how: str) -> None:
    conversation = client.conversations.create().id

    def turn(body: dict[str, Any]) -> dict[str, Any]:
        response: Response = client.responses.create(model="tekken", **body)
        return response.model_dump()

    def link(response: dict[str, Any]) -> dict[str, Any]:
        if how == "conversation":
            return {"conversation": conversation}
        return {"previous_response_id": response["id"]} if response else {}

    await check_chain(turn, client, link)


async def test_turns_of_a_connection_run_where_the_blocks_of_their_chain_are(
    suite: Suite, client: openai.OpenAI
) -> None:
    with response_socket(suite.url) as socket:

        def turn(body: dict[str, Any]) -> dict[str, Any]:
            response: dict[str, Any] = socket.turn(**body, store=False)[-1]["response"]
            return response

        await check_chain(turn, client, lambda response: {"previous_response_id": response["id"]} if response else {})
