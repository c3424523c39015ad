from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.engines import process as engine_process
from services.preprocess.engines.engine_tokenizer import EngineTokenizer
from services.preprocess.engines.process import EngineProcess
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from tests.support.oracles.errors import raises_error
from tests.support.repository import ROOT


def process(mode: str = "ready", limit_s: float = 60, start_s: float = 60, **more: Any) -> EngineProcess:
    command = [sys.executable, "-P", str(ROOT / "tests/support/fakes/fake_engine.py"), str(ROOT / "services"), mode]
    return EngineProcess(command, limit_s, limit_s + start_s, start_s, **more)


@pytest.fixture
def ready() -> Iterator[EngineProcess]:
    made = process()
    made.facts()
    yield made
    made.close()


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_calls_return_the_results_of_the_tokenizer(ready: EngineProcess) -> None:
    assert ready.facts()["vocab_size"] == 256
    assert ready.call("encode_chat", chat("Grüße")) == list("Grüße".encode())
    assert ready.call("render", chat("x")) == "x"
    assert ready.call("encode_text", {"text": "ab", "add_special_tokens": None}) == [97, 98]
    assert ready.call("decode", {"token_ids": [97, 255], "skip_special_tokens": False}) == "a?"
    assert ready.outstanding == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("fail", r"rejected this request: this will not do\."), ("memory", "too much memory")],
)
def test_what_the_tokenizer_raises_is_a_typed_error(ready: EngineProcess, text: str, sentence: str) -> None:
    with raises_error(match=sentence, kind=ErrorKind.INVALID_ARGUMENT, param="messages"):
        ready.call("encode_chat", chat(text))
    assert ready.call("encode_chat", chat("next")) == list(b"next")


def test_concurrent_calls_return_their_results(ready: EngineProcess) -> None:
    texts = [f"{index} " * (1 + index * index % 999) for index in range(300)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda text: ready.call("encode_chat", chat(text)), texts))
    assert answers == [list(text.encode()) for text in texts]


def test_frames_larger_than_the_pipes_pass_both_ways(ready: EngineProcess) -> None:
    text = "0123456789" * 100_000
    assert ready.call("encode_chat", chat(text)) == list(text.encode())


def test_a_killed_process_loses_no_request(ready: EngineProcess) -> None:
    texts = [f"{index} " * 2000 for index in range(400)]
    killed: set[int] = set()
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(ready.call, "encode_chat", chat(text)) for text in texts]
        for reached in (50, 150, 250):  # 16 callers wait or compute at each of them
            assert futures[reached].result(120)
            with contextlib.suppress(ProcessLookupError):  # the one before, and the next is not up yet
                os.kill(pid := ready.pid, signal.SIGKILL)
                killed.add(pid)
        answers = [future.result(120) for future in futures]
    assert answers == [list(text.encode()) for text in texts]
    deadline = time.monotonic() + 60
    while ready.restarts < len(killed) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 <= len(killed) <= ready.restarts


def test_a_call_that_kills_fails_alone(ready: EngineProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        deadly = pool.submit(ready.call, "encode_chat", chat("die"))
        others = [pool.submit(ready.call, "encode_chat", chat(f"text {index}")) for index in range(20)]
        assert [future.result(120) for future in others] == [list(f"text {index}".encode()) for index in range(20)]
        with pytest.raises(SluiceError, match="prompt crashes the tokenizer") as caught:
            deadly.result(120)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert ready.restarts == engine_process.ATTEMPTS


def test_a_call_that_hangs_is_given_up_and_the_others_are_answered() -> None:
    made = process(limit_s=1.5)
    try:
        made.facts()
        with ThreadPoolExecutor(8) as pool:
            stuck = pool.submit(made.call, "encode_chat", chat("hang"))
            others = [pool.submit(made.call, "encode_chat", chat(f"text {index}")) for index in range(10)]
            assert [future.result(120) for future in others] == [list(f"text {index}".encode()) for index in range(10)]
            with pytest.raises(SluiceError, match=r"longer than 1\.5 s") as caught:
                stuck.result(120)
        assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
    finally:
        made.close()


@pytest.mark.parametrize(("text", "kind"), [("hang", ErrorKind.DEADLINE_EXCEEDED), ("die", ErrorKind.INTERNAL)])
def test_calls_that_travel_with_one_that_hangs_or_kills_are_answered(text: str, kind: ErrorKind) -> None:
    made = process(limit_s=1.5)
    texts = [*(f"before {index}" for index in range(5)), text, *(f"after {index}" for index in range(5))]
    futures = []
    with ThreadPoolExecutor(len(texts)) as pool:
        for each in texts:  # before the process is up, so that they travel together and in this order
            futures.append(pool.submit(made.call, "encode_chat", chat(each)))
            while made.outstanding < len(futures) and not made.up:
                time.sleep(0.001)
        bad = futures.pop(5)
        assert [bytes(future.result(120)).decode() for future in futures] == [*texts[:5], *texts[6:]]
        with pytest.raises(SluiceError) as caught:
            bad.result(120)
    made.close()
    assert caught.value.kind is kind


@pytest.mark.parametrize(
    ("mode", "kind", "sentence"),
    [
        ("refuses", ErrorKind.FAILED_PRECONDITION, "No such engine"),
        ("dies", ErrorKind.UNAVAILABLE, "exited during startup"),
        ("hangs", ErrorKind.UNAVAILABLE, "exited during startup"),
    ],
)
def test_process_that_fails_to_start_raises_the_reason(mode: str, kind: ErrorKind, sentence: str) -> None:
    made = process(mode, start_s=1.5 if mode == "hangs" else 60)
    with raises_error(match=sentence, kind=kind):
        made.facts()
    made.close()
    with pytest.raises(SluiceError, match="stopping"):
        made.call("render", chat("x"))


def test_an_interpreter_that_does_not_exist_is_named_as_the_cause() -> None:
    made = EngineProcess(["/nowhere/python"], 1, 1, 1)
    with pytest.raises(SluiceError, match="could not be started: No such file"):
        made.facts()
    made.close()


def test_what_waits_is_bounded() -> None:
    made = process(max_waiting=3)
    made.facts()
    with ThreadPoolExecutor(3) as pool:
        stuck = [pool.submit(made.call, "encode_chat", chat("hang")) for _ in range(3)]
        while made.outstanding < 3:
            time.sleep(0.01)
        with raises_error(kind=ErrorKind.OVERLOADED):
            made.call("render", chat("x"))
        made.close()
        for future in stuck:
            with pytest.raises(SluiceError, match="stopping"):
                future.result(30)


def test_closing_ends_the_process(ready: EngineProcess) -> None:
    pid = ready.pid
    ready.close()
    ready.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PLAIN = ChatRequest([{"role": "user", "content": "a"}])
WITH_TEMPLATE = ChatRequest([{"role": "user", "content": "b"}], chat_template="{{ messages }}")


@pytest.fixture
def mode(tmp_path: Path) -> Path:
    """Says how the next process starts, see fake_engine."""
    file = tmp_path / "mode"
    file.write_text("ready")
    return file


@pytest.fixture
def tokenizer(tmp_path: Path, mode: Path) -> Iterator[EngineTokenizer]:
    interpreter = tmp_path / "python"
    fake = ROOT / "tests/support/fakes/fake_engine.py"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P "{fake}" "{ROOT / "services"}" "$(cat "{mode}")"\n')
    interpreter.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text("{}")
    made = EngineTokenizer("vllm", tmp_path / "model", EngineOptions(str(interpreter)))
    yield made
    made.close()


def test_call_before_the_first_start_waits_for_it_and_opens_no_other_process(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    script = f'echo >> {starts}; exec "$@"'
    command = ["sh", "-c", script, "sh", sys.executable, "-P", str(ROOT / "tests/support/fakes/fake_engine.py")]
    made = EngineProcess([*command, str(ROOT / "services"), "ready"], 60, 120, 60)
    assert made.call("encode_chat", chat("at once")) == list(b"at once")
    assert starts.read_text().count("\n") == 1
    made.close()


def test_a_process_for_clients_templates_that_did_not_start_is_started_by_the_next_one(
    tokenizer: EngineTokenizer, mode: Path
) -> None:
    mode.write_text("dies")  # a machine without memory to spare, for a moment
    for _ in range(2):
        with raises_error(kind=ErrorKind.UNAVAILABLE):
            tokenizer.encode_chat(WITH_TEMPLATE)
    mode.write_text("ready")
    assert tokenizer.encode_chat(WITH_TEMPLATE) == [98]
    assert tokenizer.encode_chat(PLAIN) == [97]


def test_a_request_that_still_holds_a_tokenizer_that_was_closed_starts_no_process(tokenizer: EngineTokenizer) -> None:
    tokenizer.close()
    for chat in (PLAIN, WITH_TEMPLATE):
        with raises_error(kind=ErrorKind.UNAVAILABLE):
            tokenizer.encode_chat(chat)
    assert tokenizer._foreign is None
