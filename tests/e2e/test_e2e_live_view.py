"""The live view and the commands for a running suite, over the real thing."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from tests.support.data.small_tekken import small_tekken
from tests.support.servers.suite import SLUICE, Suite

WITHIN_S = 30


def sluice(suite: Suite, *arguments: str, code: int = 0) -> str:
    """What the command prints; within this process, because starting one takes longer than what it does."""
    done = CliRunner().invoke(app, [*arguments, "--gateway", suite.url])
    assert done.exit_code == code, done.output
    return done.stdout


def told(suite: Suite, *arguments: str, code: int = 0) -> Any:
    return json.loads(sluice(suite, *arguments, "--json", code=code))


def ask(suite: Suite, content: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tekken", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
    answer = httpx.post(f"{suite.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    answered: dict[str, Any] = answer.json()
    return answered


def events(suite: Suite, number: int) -> list[tuple[str, dict[str, Any]]]:
    """The first events of the stream, during which requests come and go."""
    found: list[tuple[str, dict[str, Any]]] = []
    kind = "message"
    httpx.get(f"{suite.url}/ui/data/state", timeout=WITHIN_S)  # waits for a look: a new gateway may not have looked yet
    with httpx.stream("GET", f"{suite.url}/ui/data/stream", timeout=WITHIN_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                found.append((kind, json.loads(line[6:])))
                kind = "message"
                if len(found) == number:
                    break
                ask(suite, f"Tell me about {len(found)}.")
    return found


def test_the_stream_begins_with_everything_and_goes_on_with_what_changes(suite: Suite) -> None:
    (first, whole), *deltas = events(suite, 9)
    assert first == "whole"
    assert {row["health"] for row in whole["workers"]} <= {"ok"}  # those listed at the last look
    assert whole["models"] == ["tekken"]
    assert {name: len(node["serving"]) for name, node in whole["nodes"].items()} == {
        "preprocess": 1,
        "router": 1,
        "postprocess": 1,
    }
    assert [kind for kind, _ in deltas] == ["message"] * 8
    numbers = [whole["n"], *(delta["n"] for _, delta in deltas)]
    assert numbers == list(range(numbers[0], numbers[0] + 9))
    assert sum(delta["rates"]["requests"] > 0 for _, delta in deltas) >= 1
    requests = [request for _, delta in deltas for request in delta.get("requests", ())]
    assert {request["outcome"] for request in requests} == {"finished"}
    why = [delta["why"] for _, delta in deltas if "why" in delta]
    assert why
    assert {score["worker"] for score in why[-1]["scores"]} == {"worker-0", "worker-1"}
    assert max(len(json.dumps(delta)) for _, delta in deltas) < 8_000


def test_an_answer_can_be_looked_up(suite: Suite) -> None:
    answer = ask(suite, "What is a sluice?", n=2)
    found = httpx.get(f"{suite.url}/ui/data/requests/{answer['id']}").json()
    assert found["workers"][0] in ("worker-0", "worker-1")
    assert found["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["output_tokens"] == 8
    assert min(found["tokenize_ms"], found["route_ms"], found["first_ms"]) > 0
    assert httpx.get(f"{suite.url}/ui/data/requests/nothing").status_code == 404


def test_route_says_where_a_prompt_goes_and_why(suite: Suite) -> None:
    text = "The canal and its locks, told from the beginning. " * 40
    ask(suite, text)
    deadline = time.monotonic() + WITHIN_S
    while True:  # until the worker's report of its cache has arrived
        verdict = told(suite, "route", text)
        if verdict["scores"][0]["overlap"][0] or time.monotonic() > deadline:
            break
    assert verdict["worker"] == verdict["scores"][0]["worker"]
    assert verdict["scores"][0]["overlap"][0] > 10
    assert 0 < verdict["tokens_to_compute"] < verdict["prompt_tokens"]
    assert {score["worker"] for score in verdict["scores"]} == {"worker-0", "worker-1"}
    assert verdict["worker"] in sluice(suite, "route", text, "--raw")


def test_workers_are_listed(suite: Suite) -> None:
    workers = told(suite, "workers")
    assert [(worker["id"], worker["health"]) for worker in workers] == [
        ("worker-0", "serving"),
        ("worker-1", "serving"),
    ]
    assert {worker["address"] for worker in workers} == set(suite.addresses("worker"))
    by_router = told(suite, "workers", "--router", suite.address("router"))
    assert [worker["id"] for worker in by_router] == ["worker-0", "worker-1"]
    assert "worker-1" in sluice(suite, "workers")


def test_top_shows_the_suite(suite: Suite) -> None:
    ask(suite, "Hello")
    state = told(suite, "top", "--once")
    assert {row["id"] for row in state["workers"]} == {"worker-0", "worker-1"}
    assert state["requests"]
    assert "worker-0" in sluice(suite, "top", "--once")


@pytest.mark.parametrize(("columns", "rows", "said"), [(40, 6, "The terminal has 40×6"), (100, 24, "worker-1")])
def test_top_in_a_terminal_ends_with_control_c(suite: Suite, columns: int, rows: int, said: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (rows, columns))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"TERM": "xterm", "NO_COLOR": "1"}
    command = [str(SLUICE), "top", "--gateway", suite.url]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as top:
        os.close(theirs)
        try:
            text, deadline = b"", time.monotonic() + WITHIN_S
            while said.encode() not in text and time.monotonic() < deadline:
                text += os.read(ours, 4096)
            assert said in text.decode()
            assert b"\x1b[3" not in text, "colours, though NO_COLOR is set"
            top.send_signal(signal.SIGINT)
            drain(ours)
            assert top.wait(WITHIN_S) == 0
        finally:
            top.kill()
            os.close(ours)


def drain(terminal: int) -> None:
    """Reads until the other side is closed, so that it is never kept from writing; no longer than `WITHIN_S`."""
    until = time.monotonic() + WITHIN_S
    with suppress(OSError):
        while select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0]:
            if not os.read(terminal, 4096):
                return


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes its time is no clock that is wrong."""
    monkeypatch.setattr("sluice.cli.doctor.finding.CLOCK_WARN_S", 20.0)


@pytest.mark.usefixtures("patient")
def test_the_doctor_finds_nothing_wrong_and_looked_everywhere(suite: Suite) -> None:
    said = told(suite, "doctor")
    checks = {check["check"].rpartition(" 127.")[0] or check["check"]: check for check in said["checks"]}
    assert said["ok"], said
    looked = ("gateway ready", "gateway clock", "preprocess", "router", "postprocess", "worker-0", "worker-1")
    for name in (*looked, "routing tekken", "gateway version"):
        assert checks[name]["state"] == "ok", checks[name]
    assert (checks["clocks"]["state"], checks["clocks"]["found"][:10]) == ("ok", "5 services")
    assert checks["parity tekken"]["state"] in ("ok", "warn")
    assert checks["redis"]["state"] == checks["certificates"]["state"] == "skipped"
    assert "0 failed" in sluice(suite, "doctor")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("certs")
    subprocess.run([str(SLUICE), "certs", str(folder), "--days", "5"], check=True, capture_output=True)
    env = {"SLUICE_GATEWAY_UI": "false", "SLUICE_GATEWAY_HTTPS_CLIENT_CA": str(folder / "ca.pem")}
    with Suite("--workers", "1", "--speedup", "20", "--tls", str(folder), env=env) as running:
        yield running, folder


@pytest.mark.usefixtures("patient")
def test_a_suite_that_speaks_tls_is_examined_too(secured: Any) -> None:
    suite, folder = secured
    tls = ("--tls", str(folder), "--router", suite.address("router"))
    assert [worker["health"] for worker in told(suite, "workers", *tls)] == ["serving"]
    assert told(suite, "route", "A canal and its locks", *tls)["worker"] == "worker-0"
    checks = {check["check"]: check for check in told(suite, "doctor", *tls)["checks"]}
    assert checks["certificate of the gateway"]["state"] == "warn"
    assert "4 days" in checks["certificate of the gateway"]["found"]
    assert checks["certificate client.pem"]["state"] == "warn"
    (worker,) = suite.addresses("worker")
    shown = checks[f"certificate of worker-0 {worker}"]
    assert (shown["state"], shown["found"]) == ("warn", "valid for 4 days")
    assert checks["clocks"]["state"] == "ok"
    assert "--ui" in checks["live view"]["advice"]


def test_other_commands_take_the_same_folder(secured: Any) -> None:
    suite, folder = secured
    (address,) = suite.addresses("worker")
    conformance = ["conformance", address, "--rule", "info", "--json"]
    refused = CliRunner().invoke(app, conformance)
    assert refused.exit_code != 0
    done = CliRunner().invoke(app, [*conformance, "--tls", str(folder)])
    assert done.exit_code == 0, done.output
    assert [(rule["rule"], rule["verdict"]) for rule in json.loads(done.stdout)["rules"]] == [("info", "pass")]
    files = [f"--tls-{name}" for name in ("ca", "cert", "key")]
    paths = [str(folder / name) for name in ("ca.pem", "client.pem", "client.key")]
    given = [word for pair in zip(files, paths, strict=True) for word in pair]
    assert told(suite, "workers", *given, "--router", suite.address("router"))[0]["health"] == "serving"

    model = ("--model", f"tekken={small_tekken()}")
    flags = (*model, "--worker-id", "by-hand", "--speedup", "20", "--routers", suite.address("router"))
    command = [str(SLUICE), "worker", "--listen", "127.0.0.1:0", "--tls", str(folder), *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as worker:
        try:
            deadline = time.monotonic() + 60
            tls = ("--tls", str(folder), "--router", suite.address("router"))
            listed = ["workers", "--json", "--gateway", suite.url, *tls]
            while not re.search(r'"id": "by-hand"[^}]*"health": "serving"', CliRunner().invoke(app, listed).stdout):
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            worker.terminate()


def test_whoever_does_not_trust_it_hears_why(secured: Any) -> None:
    suite, _ = secured
    checks = {check["check"]: check for check in told(suite, "doctor", code=1)["checks"]}
    assert checks["gateway"]["state"] == "fail"
    assert "certificate" in checks["gateway"]["found"].lower()
