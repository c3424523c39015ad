"""The audit log: its lines, its bounds, and what it does when the disk does not."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.base.tasks import TaskOwner
from services.common.observability import audit
from services.common.observability.audit import AuditEntry, AuditLog, AuditSettings
from tests.support.oracles.errors import raises_error


def settings(path: Path | str, **more: Any) -> AuditSettings:
    return AuditSettings(audit_log=str(path), **more)


def entry(number: int = 0, **more: Any) -> AuditEntry:
    return AuditEntry("/v1/chat/completions", request_id=f"r{number}", status=200, **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until(path: Path, count: int) -> list[dict[str, Any]]:
    for _ in range(500):
        if len(found := lines(path)) >= count:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the lines do not come")


async def test_audit_line_has_caller_request_and_outcome(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log, tasks = AuditLog(settings(path)), TaskOwner()
    tasks.spawn(log.run(), "audit")
    one = entry(key="k1", model="m", workers=["a", "b"], prompt_tokens=3, cached_tokens=2, output_tokens=5)
    one.read(b'{"messages": "secret"}')
    one.hear("secret")
    log.write(one)
    (line,) = await until(path, 1)
    await tasks.close()
    log.close()
    assert {key: line[key] for key in ("request_id", "key", "path", "model", "workers", "outcome", "status")} == {
        "request_id": "r0",
        "key": "k1",
        "path": "/v1/chat/completions",
        "model": "m",
        "workers": ["a", "b"],
        "outcome": "completed",
        "status": 200,
    }
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (3, 2, 5)
    assert line["duration_ms"] >= 0
    assert line["time"].endswith("+00:00")
    assert "secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_content_is_written_when_asked_for_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(settings(path, audit_content=True))
    one = AuditEntry("/", with_content=log.with_content, status=200)
    one.read("frägen ".encode() * 20_000)
    for _ in range(3):
        one.hear("a" * 40_000)
    one.hear("b")
    log.write(one)
    log.close()
    (line,) = lines(path)
    assert len(line["request"].encode()) <= audit.MAX_CONTENT + 4
    assert line["answer"] == "a" * audit.MAX_CONTENT


def test_audit_outcome_distinguishes_refused_from_failed() -> None:
    assert json.loads(AuditEntry("/", status=404).line())["outcome"] == "refused"
    assert json.loads(AuditEntry("/", status=404, outcome="model_not_found").line())["outcome"] == "model_not_found"
    assert json.loads(AuditEntry("/", status=200, outcome="cancelled").line())["outcome"] == "cancelled"


def test_full_audit_queue_drops_lines_and_reports_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_WAITING", 3)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(settings(path))
    for number in range(10):
        log.write(entry(number))
    log.close()
    *written, last = lines(path)
    assert [line["request_id"] for line in written] == ["r0", "r1", "r2"]
    assert last["lost"] == 7


def test_audit_queue_above_its_byte_limit_drops_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_QUEUED", 1 << 18)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(settings(path))
    for _ in range(2):
        for number in range(10):
            long = entry(number)
            long.answer.append("x" * audit.MAX_CONTENT)
            long.with_content = True
            log.write(long)
        log._flush()
    log.close()
    written = [line for line in lines(path) if "lost" not in line]
    assert [line["request_id"] for line in written] == ["r0", "r1", "r2"] * 2
    assert [line["lost"] for line in lines(path) if "lost" in line] == [7, 7]


async def test_a_disk_that_fails_costs_lines_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    folder = tmp_path / "audit"
    folder.mkdir()
    path = folder / "audit.jsonl"
    log, tasks = AuditLog(settings(path)), TaskOwner()
    running = tasks.spawn(log.run(), "audit")
    log.write(entry(1))
    await until(path, 1)
    path.unlink()
    folder.rmdir()
    for number in range(3):
        log.write(entry(2 + number))
        async with asyncio.timeout(30):
            while log._dropped <= number:  # noqa: ASYNC110
                await asyncio.sleep(audit.WRITE_EVERY_S)
    assert not running.done()
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    folder.mkdir()
    log.write(entry(5))
    written = await until(path, 2)
    assert {"r5", None} == {line.get("request_id") for line in written}
    assert [line["lost"] for line in written if "lost" in line] == [3]
    await tasks.close()
    log.close()


def test_a_log_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(settings(path))
    log.write(entry(1))
    log._flush()
    os.replace(path, tmp_path / "moved")
    log.write(entry(2))
    log.close()
    assert [line["request_id"] for line in lines(tmp_path / "moved")] == ["r1"]
    assert [line["request_id"] for line in lines(path)] == ["r2"]


def test_it_rotates_and_keeps_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_KEPT_FILES", 2)
    monkeypatch.setattr(audit, "MAX_FILE_BYTES", 100)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(settings(path))
    for number in range(5):
        log.write(entry(number))
        log._flush()
    log.close()
    assert {file.name for file in tmp_path.iterdir()} == {"audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"}
    assert [line["request_id"] for line in lines(tmp_path / "audit.jsonl.1")] == ["r4"]
    assert [line["request_id"] for line in lines(tmp_path / "audit.jsonl.2")] == ["r3"]


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    log = AuditLog(settings("-"))
    log.write(entry(7))
    log.close()
    assert json.loads(capsys.readouterr().out)["request_id"] == "r7"


def test_a_place_where_nothing_can_be_written_is_one_sentence(tmp_path: Path) -> None:
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION) as refused:
        AuditLog(settings(tmp_path / "none" / "audit.jsonl"))
    assert "cannot be written: No such file or directory." in refused.value.message


async def test_lines_being_written_when_the_service_stops_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    log, tasks = AuditLog(settings(path)), TaskOwner()
    begun, disk, write = asyncio.Event(), threading.Event(), log._write
    loop = asyncio.get_running_loop()

    def slow_write(waiting: list[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            loop.call_soon_threadsafe(begun.set)
            disk.wait(30)
        write(waiting)

    monkeypatch.setattr(log, "_write", slow_write)
    tasks.spawn(log.run(), "audit")
    log.write(entry(1))
    await begun.wait()
    loop.call_later(0.1, disk.set)
    await tasks.close()
    log.close()
    assert [line["request_id"] for line in lines(path)] == ["r1"]


def test_audit_line_with_half_a_surrogate_pair_is_written_and_loses_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(settings(path, audit_content=True))
    entries = [entry(with_content=True) for _ in range(3)]
    entries[1].hear("half \ud801")
    for one in entries:
        log.write(one)
    log.close()
    assert [line["answer"] for line in lines(path)] == ["", "half \ufffd", ""]
