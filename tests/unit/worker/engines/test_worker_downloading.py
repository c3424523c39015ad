"""A model of the hub is fetched before the engine starts, and everybody can see how far it is."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.worker.engines.shared.download import DOWNLOADING, download

Told = list[tuple[str, float | None]]


class Hub:
    """In place of huggingface_hub.snapshot_download: two files of 100 bytes."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder = folder
        self.error = error
        self.asked: dict[str, Any] = {}
        self.thread = threading.current_thread()

    def __call__(self, hub_id: str, **asked: Any) -> str:
        self.asked, self.thread = {"hub_id": hub_id, **asked}, threading.current_thread()
        if self.error is not None:
            raise self.error
        files = asked["tqdm_class"](total=2, desc="Fetching 2 files")
        received = asked["tqdm_class"](total=0, unit="B", unit_scale=True, desc="bytes", name="hub.bytes")
        for _ in range(2):
            received.total += 100
        for _ in range(20):
            received.update(10)
        files.update(2)
        return str(self.folder)


async def test_it_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    hub, told = Hub(tmp_path), list[tuple[str, float | None]]()
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    await download("nobody/model", lambda phase, share: told.append((phase, share)))
    await asyncio.sleep(0)
    assert told == [(DOWNLOADING, None), *((DOWNLOADING, percent / 100) for percent in range(5, 101, 5))]
    assert hub.thread is not threading.main_thread()
    assert hub.asked["allow_patterns"] is None
    assert "*.gguf" in hub.asked["ignore_patterns"]
    assert capfd.readouterr().err == ""


async def test_without_weights_only_the_tokenizers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    await download("nobody/model", lambda phase, share: None, weights=False)
    assert "tokenizer.json" in hub.asked["allow_patterns"]


@pytest.mark.parametrize("source", ["mistral-common:tekken", "./here", "/nowhere", "~/there"])
async def test_what_is_no_hub_id_is_not_fetched(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(Path(), AssertionError("asked")))
    told: Told = []
    await download(source, lambda phase, share: told.append((phase, share)))
    assert told == []


async def test_a_model_that_nobody_has_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(Path(), OSError("no route")))
    with pytest.raises(SluiceError, match="neither a local folder nor available from the hub") as refused:
        await download("nobody/model", lambda phase, share: None)
    assert refused.value.kind is ErrorKind.NOT_FOUND
