"""A load of batches: a file of chats is uploaded, run and read."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

from tests.support.faults.entrances import RequestFailedError
from tests.support.faults.load import MODEL, Exchange, Load
from tests.support.faults.outcome import Answer

LINES = 4
POLL_S = 0.25
CHATS = "/v1/chat/completions"


def file_of(number: int) -> bytes:
    """Returns the content of a batch's file."""
    lines = []
    for line in range(LINES):
        said = [{"role": "user", "content": f"Line {line} of batch {number}."}]
        chat = {"model": MODEL, "messages": said, "max_tokens": 40, "ignore_eos": True, "seed": number}
        lines.append({"custom_id": f"line-{line}", "method": "POST", "url": CHATS, "body": chat})
    return "\n".join(map(json.dumps, lines)).encode()


class Batches(Load):
    """Batches of a few chats."""

    name = "batch"
    about = f"batches of {LINES} chats"
    distinct = 3

    async def ask(self, number: int, exchange: Exchange) -> Answer:
        http = self.entrances.http
        name = f"requests-{uuid4().hex}.jsonl"  # by which a client finds what it created without learning of it
        upload = {"file": (name, file_of(number))}
        file = (await http(exchange, "POST", "/v1/files", data={"purpose": "batch"}, files=upload)).json()
        asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h", "metadata": {"for": name}}
        batch = await self._ended(exchange, (await http(exchange, "POST", "/v1/batches", json=asked)).json())
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != LINES:
            raise RequestFailedError(f"batch {batch['status']}: {batch['request_counts']} {batch.get('errors')}")
        content = (await http(exchange, "GET", f"/v1/files/{batch['output_file_id']}/content")).text
        await self.entrances.delete(exchange, f"/v1/batches/{batch['id']}")
        await self.entrances.delete(exchange, f"/v1/files/{file['id']}")
        if exchange.retried:
            await self._delete_doubled(exchange, name)
        return _answer(list(map(json.loads, content.splitlines())))

    async def _ended(self, exchange: Exchange, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch once it has ended."""
        while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(POLL_S)
            batch = (await self.entrances.http(exchange, "GET", f"/v1/batches/{batch['id']}")).json()
        return batch

    async def _delete_doubled(self, exchange: Exchange, name: str) -> None:
        """Deletes what was created by attempts whose answer was lost, and created once more by the next one."""
        http = self.entrances.http
        for batch in (await http(exchange, "GET", "/v1/batches?limit=100")).json()["data"]:
            if (batch["metadata"] or {}).get("for") == name:
                await self._ended(exchange, batch)
                await self.entrances.delete(exchange, f"/v1/batches/{batch['id']}")
        for file in (await http(exchange, "GET", "/v1/files?purpose=batch")).json()["data"]:
            if file["filename"] == name:
                await self.entrances.delete(exchange, f"/v1/files/{file['id']}")


def _answer(lines: list[dict[str, Any]]) -> Answer:
    """Returns the results in the order of their ids; a result that is there twice makes a difference."""
    said = sorted((line["custom_id"], line["response"]["body"]) for line in lines)
    texts = (f"{name}: {answer['choices'][0]['message']['content']}" for name, answer in said)
    return Answer(tuple(texts), sum(answer["usage"]["completion_tokens"] for _, answer in said))
