from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.preprocess.protocol import ChatRequest
from services.preprocess.tokenizers.engine import EngineOptions, EngineTokenizer
from tests.support.repository import ROOT

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


def test_a_process_for_clients_templates_that_did_not_start_is_started_by_the_next_one(
    tokenizer: EngineTokenizer, mode: Path
) -> None:
    mode.write_text("dies")  # a machine without memory to spare, for a moment
    for _ in range(2):
        with pytest.raises(SluiceError) as caught:
            tokenizer.encode_chat(WITH_TEMPLATE)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
    mode.write_text("ready")
    assert tokenizer.encode_chat(WITH_TEMPLATE) == [98]
    assert tokenizer.encode_chat(PLAIN) == [97]


def test_a_request_that_still_holds_a_tokenizer_that_was_closed_starts_no_process(tokenizer: EngineTokenizer) -> None:
    tokenizer.close()
    for chat in (PLAIN, WITH_TEMPLATE):
        with pytest.raises(SluiceError) as caught:
            tokenizer.encode_chat(chat)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert tokenizer._foreign is None
