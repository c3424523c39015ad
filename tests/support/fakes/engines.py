"""Small things the worker's tests share: a vocabulary of words, a sink that remembers, an engine in a few lines."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Self

from services.common.base.errors import SluiceError
from services.common.types.media.spans import content_hash
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.engine import EngineConfig, GenerateContext, LLMEngine, Load, Sink
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    MediaFile,
    MediaItem,
    MediaKind,
    MediaSpan,
    PositionLogprobs,
    StopParams,
    Usage,
)
from services.worker.engines.mock.vocabulary import MockVocabulary
from services.worker.settings import WorkerSettings

BOS, EOS, TURN = 0, 1, 2


class WordVocabulary(MockVocabulary):
    """One id a word, given out on first sight; 0 begins, 1 ends, 2 separates turns."""

    def __init__(self, size: int = 5_000) -> None:
        self.size = size
        self.special_ids = frozenset({BOS, EOS, TURN})
        self.eos_ids = (EOS,)
        self._ids: dict[str, int] = {}
        self._words: dict[int, str] = {}

    def _encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words.get(token_id, f"w{token_id}") for token_id in ids if token_id > TURN)

    def _id(self, word: str) -> int:
        token_id = self._ids.setdefault(word, 10 + len(self._ids))
        self._words[token_id] = word
        return token_id


class RecordingSink(Sink):
    """Remembers what it was told, and in which order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.token_ids = array("I")
        self.cached_tokens: int | None = None
        self.reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.stop_token_id: int | None = None
        self.error: SluiceError | None = None
        self.done = asyncio.Event()

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self.calls.append("begin")
        self.cached_tokens = cached_tokens

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self.calls.append("push")
        self.token_ids.extend(token_ids)

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        self.calls.append("finish")
        self.reason, self.usage, self.stop_token_id, self.error = reason, usage, stop_token_id, error
        self.done.set()


def media_item(kind: MediaKind) -> MediaItem:
    """A short file of a kind, where the prompt's first token is."""
    file = MediaFile(content_hash(b"file"), b"file")
    return MediaItem(MediaSpan(kind, file.hash, 0, 1), file)


def request(request_id: str = "r", prompt: Sequence[int] = (BOS, 20, 21, TURN), **fields: Any) -> GenerateRequest:
    """A request; fields of Stop may be given directly."""
    stop = {name: fields.pop(name) for name in StopParams.__dataclass_fields__ if name in fields}
    return GenerateRequest(
        **{
            "request_id": request_id,
            "model": "tiny",
            "token_ids": array("I", prompt),
            "stop": StopParams(**stop),
            **fields,
        }
    )


CONFIG = EngineConfig(
    model="tiny",
    source="nowhere",
    processor="hf",
    fingerprint="",
    context_length=64,
    vocab_size=1_000,
    block_size=4,
    total_blocks=64,
    max_sequences=8,
    max_batched_tokens=64,
    eos_token_ids=(EOS,),
    adapters=("polite",),
    engine="scripted",
    capabilities=frozenset({"token_ids", "lora", "min_tokens", "ignore_eos", "temperature", "seed"}),
)


class ScriptedEngine(LLMEngine):
    """Writes only what an engine has to: yields the script, then waits for `release` when told to hold."""

    def __init__(self, script: Sequence[Delta | Exception] = (), *, hold: bool = False) -> None:
        super().__init__()
        self.script = script
        self.hold = hold
        self.release = asyncio.Event()
        self.closed: list[str] = []
        self.cleanups = 0

    @classmethod
    def from_args(cls, settings: WorkerSettings) -> Self:
        return cls()

    async def start(self, worker_id: str) -> EngineConfig:
        return CONFIG

    async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
        try:
            for delta in self.script:
                if isinstance(delta, Exception):
                    raise delta
                yield delta
            if self.hold:
                await self.release.wait()
        finally:
            self.closed.append(request.request_id)

    def load(self) -> Sequence[Load]:
        return [Load(running_requests=len(self._generate_tasks))]

    async def cleanup(self) -> None:
        self.cleanups += 1
        await self.tasks.close()


def replay(events: Iterable[KvEvent], present: set[int]) -> None:
    """Applies events as strictly as an index could: nothing is stored twice, nothing unknown is removed."""
    for event in events:
        if isinstance(event, BlocksStored):
            assert not present.intersection(event.hashes)
            present.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            assert present.issuperset(event.hashes)
            present.difference_update(event.hashes)
        else:
            present.clear()
