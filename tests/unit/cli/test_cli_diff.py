from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli import diff
from sluice.cli.diff import Side, first_difference
from sluice.cli.errors import BadFlag
from tests.support.data.loaded_tokenizers import tiny_folder
from tests.unit.cli.conftest import Sluice


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), max_size=5))
def test_the_first_difference_is_where_the_ids_part(left: list[int], right: list[int]) -> None:
    position = first_difference(Side(tuple(left)), Side(tuple(right)))
    if position is None:
        assert left == right
    else:
        assert left[:position] == right[:position]
        assert left[position : position + 1] != right[position : position + 1]


def test_a_refusal_differs_from_ids_and_not_from_a_refusal() -> None:
    assert first_difference(Side(refusal="no"), Side((1,))) == 0
    assert first_difference(Side(refusal="no"), Side(refusal="never")) is None


def test_a_tokenizer_does_not_differ_from_itself(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = str(tiny_folder())
    assert sluice("diff-tokenizers", tiny, f"{tiny}@hf") == 0
    assert "All prompts are the same." in capsys.readouterr().out


def test_differences_are_shown_side_by_side(tmp_path: Path, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder(), other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("assistant\\n", "robot\\n")
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    assert sluice("diff-tokenizers", str(tiny_folder()), str(other)) == 1
    shown = capsys.readouterr().out
    assert "plain: the first difference" in shown
    assert "prompts differ." in shown


def test_chats_of_a_file_are_compared(tmp_path: Path, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"messages": [{"role": "user", "content": "hi"}]}\n\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    tiny = str(tiny_folder())
    assert sluice("diff-tokenizers", tiny, tiny, "--chats", str(chats)) == 0
    assert "line 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "is not a chat"),
        ("[1]", "is not a chat"),
        ("{}", "array"),
        ('{"messages": []}', "at least one"),
        ('{"messages": 1}', "array"),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(line)
    with pytest.raises(BadFlag, match=f"line 1.*{sentence}"):
        diff.read_chats(file)


@pytest.mark.parametrize(
    ("side", "sentence"),
    [
        ("/nowhere", "does not exist"),
        ("x@robot", "processor 'robot' is unknown"),
        (f"{tiny_folder()}@vllm", "--vllm-python"),
    ],
    ids=["no folder", "no processor", "no interpreter"],
)
def test_a_side_that_cannot_be_loaded_is_one_sentence(
    side: str, sentence: str, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sluice("diff-tokenizers", side, side) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_a_chat_proves_nothing(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "chats"
    file.write_bytes(content)
    with pytest.raises(BadFlag, match="--chats"):
        diff.read_chats(file)


def test_a_chat_may_hold_any_character_but_the_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "chats"
    chat = {"messages": [{"role": "user", "content": "one\u2028two\x85three"}]}
    file.write_text(json.dumps(chat, ensure_ascii=False) + "\r\n" + json.dumps(chat) + "\n", "utf-8", newline="")
    assert list(diff.read_chats(file)) == ["line 1", "line 2"]
