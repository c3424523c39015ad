"""From a prefill worker to a decode worker: the same answer as one worker gives, and nothing that does not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from struct import Struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from services.common.base.errors import ErrorKind
from services.worker.contract import handoff
from services.worker.contract.generation import (
    Delta,
    Disaggregation,
    FinishReason,
    GenerateRequest,
    Role,
)
from services.worker.contract.handoff import MAGIC, seal, unseal
from services.worker.engines.mock import engine as mock_engine
from services.worker.engines.mock.transfer import Transfer
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import request
from tests.support.oracles.errors import raises_error
from tests.support.servers.mock_workers import generate, mock_worker
from tests.support.waiting import until

PROMPT = range(3, 60)


@asynccontextmanager
async def worker(folder: Path, role: str, **fields: Any) -> AsyncIterator[Worker]:
    async with mock_worker(folder, role=role, **fields) as made:
        yield made
        await made.drain(5)


async def run(worker: Worker, asked: GenerateRequest) -> tuple[list[int], Delta]:
    deltas = await generate(worker, asked)
    return [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1]


def part(asked: GenerateRequest, role: Role, data: bytes = b"") -> GenerateRequest:
    return replace(asked, disaggregation=Disaggregation(role, data))


async def test_a_cache_on_its_way_takes_time_by_its_bytes_and_can_be_aborted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mock_engine, "TRANSFER_GBPS", 1e-6)
    asked = request(prompt=PROMPT, max_tokens=4, ignore_eos=True)
    async with (
        worker(folder, "prefill") as prefill,
        worker(folder, "decode", speedup=1.0) as decode,
    ):
        _, handed = await run(prefill, part(asked, Role.PREFILL))
        _, payload = unseal(handed.handoff, asked)
        assert Transfer.unpack(payload).cache_bytes == len(PROMPT) * 131_072
        delivery = StreamResponseSink()
        decode.submit(part(asked, Role.DECODE, handed.handoff), delivery)
        await asyncio.sleep(0.05)
        assert delivery.first_token_s is None
        decode.cancel(delivery)
        async with asyncio.timeout(30):
            terminal = [delta async for delta in delivery.deltas()][-1]
        assert terminal.finish_reason is FinishReason.CANCELLED
        assert terminal.usage is not None
        assert terminal.usage.completion_tokens == 0
        assert decode.live_requests == 0
        await decode.engine.drain()


async def test_a_preempted_handoff_is_computed_again_and_ends_the_same(folder: Path) -> None:
    asked = [request(f"r-{index}", [9 + index, *PROMPT], max_tokens=60, ignore_eos=True) for index in range(4)]
    small = {"total_blocks": 12, "block_size": 16}
    async with (
        worker(folder, "aggregated") as alone,
        worker(folder, "prefill") as prefill,
        worker(folder, "decode", **small) as decode,
    ):
        whole = [(await run(alone, one))[0] for one in asked]
        handed = [await run(prefill, part(one, Role.PREFILL)) for one in asked]
        rest = await asyncio.gather(
            *(run(decode, part(one, Role.DECODE, end.handoff)) for one, (_, end) in zip(asked, handed, strict=True))
        )
        assert [first + tokens for (first, _), (tokens, _) in zip(handed, rest, strict=True)] == whole
        await until(lambda: decode.load()[0].used_blocks == 0)


async def test_a_handoff_that_does_not_fit_is_refused_and_the_worker_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(prompt=PROMPT, max_tokens=8, ignore_eos=True)
    async with worker(folder, "prefill") as prefill, worker(folder, "decode") as decode:
        _, handed = await run(prefill, part(asked, Role.PREFILL))
        good = handed.handoff
        _, payload = unseal(good, asked)
        transfer = Transfer.unpack(payload)

        def sealed(data: bytes) -> bytes:
            return seal(asked, "prefill", 1, "", data)

        damaged = bytearray(good)
        damaged[len(damaged) // 2] ^= 1
        other = replace(asked, token_ids=asked.token_ids[:-1])
        cases = [
            (asked, b"", "malformed_handoff"),
            (asked, b"nonsense", "malformed_handoff"),
            (asked, bytes(damaged), "malformed_handoff"),
            (asked, good[:-1], "malformed_handoff"),
            (asked, sealed(b"\x09" + payload[1:]), "malformed_handoff"),
            (asked, sealed(payload[:-1]), "malformed_handoff"),
            (other, good, "foreign_handoff"),
            (replace(asked, cache_salt="x"), good, "foreign_handoff"),
            (asked, sealed(replace(transfer, block_size=32).pack()), "foreign_handoff"),
            (asked, sealed(replace(transfer, hashes=transfer.hashes[:-8]).pack()), "foreign_handoff"),
            (asked, sealed(replace(transfer, first_token=transfer.first_token + 1).pack()), "foreign_handoff"),
        ]
        for one, data, code in cases:
            with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code=code, param="disaggregation"):
                decode.submit(part(one, Role.DECODE, data), StreamResponseSink())
            assert decode.live_requests == 0
        monkeypatch.setattr(handoff, "TTL_S", -1.0)
        with raises_error(code="stale_handoff"):
            decode.submit(part(asked, Role.DECODE, good), StreamResponseSink())
        monkeypatch.undo()
        tokens, _ = await run(decode, part(asked, Role.DECODE, good))
        assert len(tokens) == 7


@given(st.binary(max_size=300))
def test_no_bytes_break_the_envelope(data: bytes) -> None:
    with raises_error(code="malformed_handoff"):
        unseal(data, request())


@pytest.mark.parametrize("broken", [b"[" * 100_000, b"[]", b"{}", b"null"])
def test_a_header_of_another_form_is_refused_like_damage(broken: bytes) -> None:
    (size,) = Struct("<I").unpack_from(good := seal(request(), "w", 7, "", b""), len(MAGIC))
    fields = json.loads(good[8 : 8 + size])
    for name in ("issued_unix_ms", "traceparent"):
        header = json.dumps({**fields, name: "here"}).encode().replace(b'"here"', broken)
        body = MAGIC + Struct("<I").pack(len(header)) + header
        with raises_error(code="malformed_handoff"):
            unseal(body + Struct("<Q").pack(xxh3_64_intdigest(body)), request())
