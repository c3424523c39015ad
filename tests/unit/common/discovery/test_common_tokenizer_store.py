from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from services.common.discovery import tokenizer_store
from services.common.discovery.tokenizer_store import IncomingTokenizer, TokenizerStore
from services.common.errors import ErrorKind, SluiceError
from services.common.models import fingerprint

FILES = {"tokenizer.json": b"{}", "config.json": b'{"a": 1}', "chat_template.jinja": b""}


def print_of(files: dict[str, bytes], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return fingerprint(folder)


@pytest.fixture
def store(tmp_path: Path) -> TokenizerStore:
    return TokenizerStore(tmp_path / "cache" / "tokenizers")


def send(incoming: IncomingTokenizer, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        half = len(data) // 2
        incoming.add(name, len(data), data[:half])
        incoming.add(name, len(data), data[half:])


def test_what_is_complete_is_found(store: TokenizerStore, tmp_path: Path) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    assert store.find(wanted) is None
    incoming = store.receive(wanted)
    send(incoming, FILES)
    assert store.find(wanted) is None  # not before it was checked
    path = incoming.keep()
    assert store.find(wanted) == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert [entry.name for entry in path.parent.iterdir()] == [wanted]


@pytest.mark.parametrize("damage", ["gone", "missing", "changed", "more"])
def test_what_was_damaged_since_is_not_found_and_can_be_stored_anew(
    store: TokenizerStore, tmp_path: Path, damage: str
) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    incoming = store.receive(wanted)
    send(incoming, FILES)
    path = incoming.keep()
    if damage == "gone":
        for file in path.iterdir():
            file.unlink()
    elif damage == "missing":  # whoever clears caches takes files that nobody has opened for long
        (path / "chat_template.jinja").unlink()
    elif damage == "changed":
        (path / "config.json").write_bytes(b'{"a": 2}')
    else:
        (path / "tokenizer_config.json").write_bytes(b"{}")
    assert store.find(wanted) is None
    again = store.receive(wanted)
    send(again, FILES)
    assert store.find(wanted) is None
    path = again.keep()
    assert store.find(wanted) == path
    assert {file.name: file.read_bytes() for file in path.iterdir()} == FILES
    assert [entry.name for entry in path.parent.iterdir()] == [wanted]


def test_of_two_who_store_the_same_both_succeed(store: TokenizerStore, tmp_path: Path) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    one, other = store.receive(wanted), store.receive(wanted)
    send(one, FILES)
    send(other, FILES)
    assert one.keep() == other.keep() == store.find(wanted)
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 1


def test_content_that_does_not_match_is_refused_and_leaves_nothing(store: TokenizerStore, tmp_path: Path) -> None:
    wanted = print_of(FILES, tmp_path / "original")
    incoming = store.receive(wanted)
    send(incoming, {**FILES, "config.json": b'{"a": 2}'})
    with pytest.raises(SluiceError, match="does not match its fingerprint") as caught:
        incoming.keep()
    assert (caught.value.kind, caught.value.code) == (ErrorKind.INVALID_ARGUMENT, "bad_tokenizer")
    incoming.drop()
    assert store.find(wanted) is None
    assert not list((tmp_path / "cache/tokenizers").iterdir())


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "a\nb", "x" * 200, "a\\b"]
)
def test_names_that_could_lead_elsewhere_are_refused(store: TokenizerStore, name: str) -> None:
    incoming = store.receive("0" * 64)
    with pytest.raises(SluiceError):
        incoming.add(name, 1, b"x")
    incoming.drop()


def test_pieces_must_fit_what_was_announced(store: TokenizerStore) -> None:
    incoming = store.receive("0" * 64)
    with pytest.raises(SluiceError, match="longer than announced"):
        incoming.add("tokenizer.json", 1, b"xy")
    incoming = store.receive("0" * 64)
    incoming.add("tokenizer.json", 2, b"x")
    with pytest.raises(SluiceError, match="shorter than announced"):
        incoming.add("config.json", 1, b"x")
    incoming = store.receive("0" * 64)
    incoming.add("tokenizer.json", 1, b"x")
    incoming.add("config.json", 1, b"x")
    with pytest.raises(SluiceError, match="not allowed"):
        incoming.add("tokenizer.json", 1, b"x")  # a file that was complete already


def test_size_and_number_of_files_are_bounded(store: TokenizerStore) -> None:
    incoming = store.receive("0" * 64)
    with pytest.raises(SluiceError, match="larger than"):
        incoming.add("tokenizer.json", tokenizer_store.MAX_BYTES + 1, b"")
    incoming = store.receive("0" * 64)
    for index in range(tokenizer_store.MAX_FILES):
        incoming.add(f"additional_chat_templates/{index}.jinja", 0, b"")
    with pytest.raises(SluiceError, match="more than 64 files"):
        incoming.add("tokenizer.json", 0, b"")


@pytest.mark.parametrize("wanted", ["", "abc", "../" + "0" * 61, "G" * 64])
def test_what_is_no_fingerprint_is_neither_found_nor_received(store: TokenizerStore, wanted: str) -> None:
    assert store.find(wanted) is None
    with pytest.raises(SluiceError, match="no valid fingerprint"):
        store.receive(wanted)


def test_an_empty_tokenizer_is_refused(store: TokenizerStore) -> None:
    with pytest.raises(SluiceError, match="does not match"):
        store.receive("0" * 64).keep()


def test_what_others_left_behind_is_removed_when_it_is_old(store: TokenizerStore, tmp_path: Path) -> None:
    store.receive("0" * 64)
    old, young = store.receive("0" * 64), store.receive("0" * 64)
    past = time.time() - tokenizer_store.ABANDONED_S - 1
    os.utime(old._folder, (past, past))
    store.receive("0" * 64)
    assert not old._folder.exists()
    assert young._folder.exists()


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SluiceError, match="cannot be stored") as caught:
        TokenizerStore(tmp_path / "file" / "cache").receive("0" * 64)
    assert caught.value.kind is ErrorKind.FAILED_PRECONDITION
