"""Makes prompts with media items twice, as vLLM's server does and as the worker does: JSON in and out.

In: {"model", "chats": [messages in OpenAI's form, with data URLs], "missing": packages that cannot be imported}. Out:
{"kinds": that the worker takes, "log": its warnings, "answers": of each chat {"ids", "spans": of each item its kind,
offset, length and number in its kind, "worker": the same of the worker, "differs": what the worker reads otherwise than
the server}}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from array import array
from types import SimpleNamespace
from typing import Any

QUESTION: dict[str, Any] = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(QUESTION["missing"]))  # None makes an import fail

import torch  # noqa: E402
from vllm.config import DeviceConfig, ModelConfig, VllmConfig  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer  # noqa: E402

from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash  # noqa: E402
from services.worker.contract.generation import MediaItem  # noqa: E402
from services.worker.engines.vllm import media_files  # noqa: E402
from services.worker.engines.vllm.media import MediaPrompts  # noqa: E402

PARTS = {"image_url": MediaKind.IMAGE, "input_audio": MediaKind.AUDIO, "video_url": MediaKind.VIDEO}


def files_of(chat: list[dict[str, Any]]) -> dict[str, list[bytes]]:
    """The files of a chat by kind, in order."""
    found: dict[str, list[bytes]] = {}
    for message in chat:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if (kind := PARTS.get(part["type"])) is not None:
                value = part[part["type"]]
                text = value["data"] if "data" in value else value["url"].partition(",")[2]
                found.setdefault(kind.capability, []).append(base64.b64decode(text))
    return found


def spans_of(prompt: Any) -> list[list[Any]]:
    """Kind, offset, length and number in its kind of each item, by offset."""
    ranges = prompt["mm_placeholders"]
    found = [
        [kind, int(each.offset), int(each.length), number]
        for kind, items in ranges.items()
        for number, each in enumerate(items)
    ]
    return sorted(found, key=lambda span: span[1])


def items_of(ids: list[int], spans: list[list[Any]], files: dict[str, list[bytes]]) -> list[MediaItem]:
    """The items of a prompt as preprocess sends them."""
    found = []
    for kind, offset, length, number in spans:
        data = files[kind][number]
        digest = content_hash(data)
        short = array("I", [ids[offset]]).tobytes()
        span = MediaSpan(MediaKind[kind.upper()], digest, offset, length, short, length)
        found.append(MediaItem(span, MediaFile(digest, data)))
    return found


def differing(server: Any, worker: Any) -> list[str]:
    """The features whose values are not the same in both prompts."""
    found = []
    for kind, items in server["mm_kwargs"].items():
        for number, (mine, theirs) in enumerate(zip(worker["mm_kwargs"][kind], items, strict=True)):
            left, right = mine.get_data(), theirs.get_data()
            names = {name for name in {*left, *right} if not equal(left.get(name), right.get(name))}
            found += [f"{kind} {number} {name}" for name in sorted(names)]
    return found


def equal(left: Any, right: Any) -> bool:
    """Whether two values of a feature are the same."""
    return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)


class Kept(logging.Handler):
    """The texts of the records of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


async def both(server: OnlineRenderer, worker: MediaPrompts, chat: list[dict[str, Any]]) -> dict[str, Any]:
    """One chat's prompt by server and worker."""
    rendered = await server.render_chat(ChatCompletionRequest(model="m", messages=chat, max_tokens=1))
    assert isinstance(rendered, tuple), rendered
    _, (theirs,) = rendered
    ids, spans = [int(token) for token in theirs["prompt_token_ids"]], spans_of(theirs)
    items = items_of(ids, spans, files_of(chat))
    mine = await worker.prompt(array("I", ids), items, "", 0)
    named = [mine["mm_hashes"][kind][number] for kind, _, _, number in spans]
    assert named == [item.span.hash.hex() for item in items], "an item's identifier is not its content hash"
    return {"ids": ids, "spans": spans, "worker": spans_of(mine), "differs": differing(theirs, mine)}


async def run() -> dict[str, Any]:
    """Every chat in order."""
    folder, log = QUESTION["model"], Kept()
    media_files.log.addHandler(log)
    # Without a cache, every prompt contains its features.
    model = ModelConfig(model=folder, tokenizer=folder, dtype="float32", enforce_eager=True, mm_processor_cache_gb=0)
    renderer = renderer_from_config(VllmConfig(model_config=model, device_config=DeviceConfig("cpu")))
    server = OnlineRenderer(
        model_config=model,
        renderer=renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    worker = MediaPrompts(SimpleNamespace(renderer=renderer, model_config=model))
    await worker.start()
    answers = [await both(server, worker, chat) for chat in QUESTION["chats"]]
    await worker.close()
    return {"kinds": sorted(kind.capability for kind in worker.kinds), "log": log.texts, "answers": answers}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run())))
