"""Audio and videos read by real processes, with a stand-in for vLLM whose files say how to misbehave."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.base.errors import ErrorKind
from services.common.types.media.spans import MediaKind
from services.worker.engines.vllm import clip_decoding
from services.worker.engines.vllm.clip_child import DECODED, FAILED, HEADER
from services.worker.engines.vllm.clip_decoding import ClipDecoder, Unreadable
from services.worker.engines.vllm.media_files import DECODED_BYTES, DecodedBudget
from tests.support.oracles.errors import raises_error

STAND_IN = Path(__file__).parents[3] / "support" / "fake_vllm_package"
OPTIONS: dict[MediaKind, dict[str, Any]] = {
    MediaKind.AUDIO: {"rate": 8_000},
    MediaKind.VIDEO: {"image": {}, "video": {"num_frames": 2}},
}
AUDIO, VIDEO = MediaKind.AUDIO, MediaKind.VIDEO


@pytest.fixture
async def decoder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ClipDecoder]:
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setattr(clip_decoding, "LIMIT_S", 2.0)
    monkeypatch.setattr(clip_decoding, "PROCESSES", 1)
    made = ClipDecoder(OPTIONS)
    await made.start()
    yield made
    await made.close()


async def test_decoder_files_of_both_kinds_returns_what_the_loader_does(decoder: ClipDecoder) -> None:
    budget = DecodedBudget(1_000, 1_000)
    samples, rate = await decoder.decode(AUDIO, b"abc", budget)
    assert (samples.tolist(), samples.dtype, rate) == ([97.0, 98.0, 99.0], np.float32, 8_000)
    samples[0] = 1  # vLLM may write to it
    frames, facts = await decoder.decode(VIDEO, b"ab", budget)
    assert frames.shape == (2, 2, 1, 3)
    assert frames[0, :, 0, 0].tolist() == [98, 97]
    assert facts == {"fps": 2.5, "frames_indices": [0, 1]}
    assert budget.left == 1_000 - 3 * 4 - 12


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"crash", "ended the process"),
        (b"hang", "too long"),
        (b"memory", "too much memory"),
        (b"broken", "^no header.$"),
    ],
)
async def test_decoder_file_that_harms_its_process_fails_alone(
    decoder: ClipDecoder, file: bytes, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    full = DecodedBudget.full
    harmful, *good = await asyncio.gather(
        decoder.decode(AUDIO, file, full()),
        *(decoder.decode(AUDIO, bytes([number]), full()) for number in range(4)),
        return_exceptions=True,
    )
    assert isinstance(harmful, Unreadable)
    with pytest.raises(Unreadable, match=reason):
        raise harmful
    assert [samples.tolist() for samples, _ in good] == [[number] for number in range(4)]  # type: ignore[misc]
    assert "noise" not in capfd.readouterr().err


async def test_decoder_file_over_the_budget_is_refused_with_its_setting(decoder: ClipDecoder) -> None:
    for budget in (DecodedBudget(11, 11), DecodedBudget(100, 3)):
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media", match=DECODED_BYTES):
            await decoder.decode(AUDIO, b"abc", budget)


async def test_decoder_processes_have_no_secrets_in_their_environment(
    decoder: ClipDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_VIDEO_LOADER_BACKEND"):
        monkeypatch.setenv(name, "x")
    another = ClipDecoder(OPTIONS)
    try:
        with pytest.raises(Unreadable) as caught:
            await another.decode(AUDIO, b"environment", DecodedBudget.full())
    finally:
        await another.close()
    names = set(str(caught.value).split())
    assert "VLLM_VIDEO_LOADER_BACKEND" in names
    assert not names & {"VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"}


async def test_decoder_whose_server_cannot_import_the_loaders_is_an_internal_error() -> None:
    decoder = ClipDecoder(OPTIONS)
    try:
        with raises_error(kind=ErrorKind.INTERNAL, match="No process for audio and videos"):
            await decoder.decode(AUDIO, b"abc", DecodedBudget.full())
    finally:
        await decoder.close()


def _reply(header: bytes, data: bytes = b"", status: bytes = DECODED) -> bytes:
    return status + HEADER.pack(len(header)) + header + data


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        DECODED,
        DECODED + b"\xff" * 4 + b"{",
        _reply(b"no json"),
        _reply(b"[]"),
        _reply(b"{}"),
        _reply(b'{"type": "|O", "shape": [1], "facts": 0}', bytes(8)),
        _reply(b'{"type": "<f4", "shape": [2], "facts": 0}', bytes(7)),
        _reply(b'{"type": "<f4", "shape": [-1, -2], "facts": 0}', bytes(8)),
        _reply(b'{"type": "M8[s]", "shape": [1], "facts": 0}', bytes(8)),
        _reply(b'{"type": "no", "shape": [1], "facts": 0}', bytes(8)),
    ],
)
def test_decoder_invalid_reply_of_a_process_is_a_failure(reply: bytes) -> None:
    assert clip_decoding.read_reply(reply) == clip_decoding.Decoded(FAILED, "its process sent an invalid reply")


def test_decoder_without_a_bound_limits_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DECODED_BYTES, "0")
    assert DecodedBudget.full().most == sys.maxsize
    ClipDecoder({})
