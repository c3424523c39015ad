"""A model of the hub is fetched before the engine starts, and everybody can see how far it is."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.engines.shared.arguments import check_names, parse_engine_args, read_options
from services.worker.engines.shared.download import DOWNLOADING, download
from tests.support.oracles.errors import raises_error

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


async def test_download_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    hub, told = Hub(tmp_path), list[tuple[str, float | None]]()
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    await download("unknown/model", lambda phase, share: told.append((phase, share)))
    await asyncio.sleep(0)
    assert told == [(DOWNLOADING, None), *((DOWNLOADING, percent / 100) for percent in range(5, 101, 5))]
    assert hub.thread is not threading.main_thread()
    assert hub.asked["allow_patterns"] is None
    assert "*.gguf" in hub.asked["ignore_patterns"]
    assert capfd.readouterr().err == ""


async def test_without_weights_only_the_tokenizers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    await download("unknown/model", lambda phase, share: None, weights=False)
    assert "tokenizer.json" in hub.asked["allow_patterns"]


@pytest.mark.parametrize("source", ["mistral-common:tekken", "./here", "/nowhere", "~/there"])
async def test_what_is_no_hub_id_is_not_fetched(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(Path(), AssertionError("asked")))
    reported: Told = []
    await download(source, lambda phase, share: reported.append((phase, share)))
    assert reported == []


async def test_download_of_an_unknown_model_raises_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(Path(), OSError("no route")))
    with raises_error(match="neither a local folder nor available from the hub", kind=ErrorKind.NOT_FOUND):
        await download("unknown/model", lambda phase, share: None)


@dataclass(frozen=True, slots=True)
class Options:
    device: str = "cpu"
    threads: int | None = None
    share: float = 0.5
    eager: bool = False


def refusal(text: str) -> str:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT) as caught:
        read_options(text, Options, "example")
    return caught.value.message


def test_engine_arguments_in_both_forms_are_equal() -> None:
    short = read_options("device=cuda:0,threads=4,share=1,eager=true", Options, "example")
    full = read_options('{"device": "cuda:0", "threads": 4, "share": 1.0, "eager": true}', Options, "example")
    assert short == full == Options("cuda:0", 4, 1.0, True)


def test_dashes_are_underscores_and_nothing_is_nothing() -> None:
    assert parse_engine_args("--max-num-seqs=8,enforce-eager=true") == {"max_num_seqs": 8, "enforce_eager": True}
    assert parse_engine_args("  ") == {}
    assert read_options("", Options, "example") == Options()
    assert read_options("threads=null", Options, "example") == Options()


def test_nested_objects_survive() -> None:
    assert parse_engine_args('{"kv": {"a": [1, {"b": null}]}}') == {"kv": {"a": [1, {"b": None}]}}


def test_unknown_options_are_named_with_the_nearest_known_one() -> None:
    message = refusal("thread=4")
    assert "'thread'" in message
    assert "'threads'" in message
    assert "device, eager, share, threads" in refusal("zzz=1")


@pytest.mark.parametrize(
    "text",
    ["threads", "=1", '{"threads": 1', "[1]", "threads=1,threads=2", '{"threads": 1, "threads": 2}', "threads=few"],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    assert refusal(text)


def test_a_truth_value_is_no_number() -> None:
    assert "'threads'" in refusal("threads=true")
    assert "'share'" in refusal("share=true")


def test_names_are_checked_against_any_list() -> None:
    check_names({"a": 1}, ["a", "b"], "example")
    with pytest.raises(SluiceError):
        check_names({"c": 1}, ["a", "b"], "example")


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers() | st.booleans() | st.text()))
def test_any_json_object_is_read_as_it_is(options: dict[str, object]) -> None:
    named = {name: value for name, value in options.items() if name.strip("-_")}
    assert parse_engine_args(json.dumps(named)) == named


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(SluiceError):
        assert isinstance(parse_engine_args(text), dict)
