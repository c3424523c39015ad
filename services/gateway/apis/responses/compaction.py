"""Compaction of conversations: the model's summary replaces everything but the user's messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from services.gateway.apis.common.output import Counts
from services.gateway.apis.common.transcript import Block, BlockKind
from services.gateway.apis.responses.items import Item, compaction_item, new_id, user_message
from services.gateway.apis.responses.resource import usage
from services.gateway.apis.responses.tools import ChatTools

NO_TOOLS = ChatTools([], [], None, {})
INSTRUCTION = """\
Summarize the conversation above for the assistant that continues it, which sees only the user's messages and this
summary: what was asked, what was decided and done, with the names, paths, values and results that matter, what is left
to do, and what is known to fail. Answer with the summary only."""


def with_instruction(items: Sequence[Item]) -> list[Item]:
    """Returns the items of a conversation, followed by the request for its summary."""
    return [*items, Item(user_message(INSTRUCTION), "input")]


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
