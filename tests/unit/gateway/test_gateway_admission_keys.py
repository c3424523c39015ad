"""API keys: what the file keeps, who gets in, and what happens when the file changes."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import SluiceError
from services.common.security import file_watcher
from services.gateway.admission.keys import ApiKey, KeyFile, KeyRing, create, read, write


def test_a_key_gets_in_and_others_do_not() -> None:
    shown, record = create("one")
    ring = KeyRing([record])
    assert ring.find(shown) == record
    for wrong in ("", "sluice", "sluice-", shown[:-1], shown + "x", shown.replace("sluice", "slurp"), "ü", "\udcff"):
        assert ring.find(wrong) is None, wrong


def test_the_file_holds_no_secret_and_is_its_owners(tmp_path: Path) -> None:
    shown, record = create("one", models=["a"], tokens_per_minute=7)
    path = tmp_path / "keys" / "keys.json"
    write(path, [record])
    assert shown.split("-", 2)[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == [record]
    assert list(path.parent.iterdir()) == [path]


def test_a_revoked_key_stays_known_and_does_not_get_in() -> None:
    shown, record = create("one")
    assert KeyRing([replace(record, revoked=True)]).find(shown) is None


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watcher, "CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    (first, one), (second, two) = create("one"), create("two")
    write(path, [one])
    file = KeyFile(path)
    assert file.ring.find(first)
    assert not file.ring.find(second)
    write(path, [two])
    assert not file.ring.find(first)
    assert file.ring.find(second)


@pytest.mark.parametrize("broken", ["", "[]", '{"keys": 1}', '{"keys": [{"id": "x"}]}', None])
def test_a_file_that_breaks_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    monkeypatch.setattr(file_watcher, "CHECK_EVERY_S", 0.0)
    path = tmp_path / "keys.json"
    shown, one = create("one")
    write(path, [one])
    file = KeyFile(path)
    if broken is None:
        os.unlink(path)
    else:
        path.write_text(broken)
    assert file.ring.find(shown)
    with pytest.raises(SluiceError, match=r"keys\.json"):
        KeyFile(path)


GOOD = {"id": "0" * 12, "name": "n", "hash": "0" * 64}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "short"),
        ("id", 5),
        ("hash", "secret"),
        ("name", ""),
        ("name", "a\nb"),
        ("requests_per_minute", -1),
        ("tokens_per_minute", 1.5),
        ("concurrency", True),
        ("priority", 10),
        ("weight", 0),
        ("models", "all"),
        ("models", [""]),
        ("revoked", "no"),
        ("scopes", "infer"),
        ("scopes", ["infer", "admin"]),
        ("scopes", [5]),
        ("scopes", None),
        ("tenant", "a b"),
        ("tenant", "a}b"),
        ("tenant", "x" * 65),
        ("tenant", "anonymous"),
        ("tenant", None),
        ("tenant", 0),
        ("quota", 1),
    ],
)
def test_every_field_is_checked(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [GOOD]}))
    assert read(path)[0].weight == 1
    path.write_text(json.dumps({"keys": [{**GOOD, field: value}]}))
    with pytest.raises(SluiceError, match=field):
        read(path)


def test_two_keys_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [GOOD, GOOD]}))
    with pytest.raises(SluiceError, match="same id"):
        read(path)


def test_models_of_a_key() -> None:
    assert ApiKey("a", "a", "").may_use("anything")
    assert not ApiKey("a", "a", "", models=("x",)).may_use("y")
