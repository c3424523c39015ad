"""Log lines: a sentence and fields, for people or for machines."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator

import pytest
from opentelemetry.trace import SpanContext

from services.common.base import logs


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info", "text")
    logging.getLogger("services.router").info("worker is %s", "up", extra={"worker": "w1", "blocks": 7})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    services\.router  worker is up  worker=w1  blocks=7\n", printed.err
    )


def test_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info", "json")
    logging.getLogger("services.router").warning("Größe %d", 3, extra={"error": ValueError("odd")})
    line = json.loads(capsys.readouterr().err)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "service": "router",
        "logger": "services.router",
        "message": "Größe 3",
        "error": "odd",
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_level(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("x", "warning", log_format)
    logging.getLogger("services.x").info("hidden")
    logging.getLogger("services.x").warning("shown")
    printed = capsys.readouterr().err
    assert "hidden" not in printed
    assert "shown" in printed


def test_request_id_is_on_every_line_of_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("x", "info", "json")
    token = logs.request_id.set("req-1")
    logging.getLogger("a").info("inside")
    logging.getLogger("a").info("its own", extra={"request_id": "req-2"})
    logs.request_id.reset(token)
    logging.getLogger("a").info("outside")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line.get("request_id") for line in lines] == ["req-1", "req-2", None]


def test_exceptions_are_one_field_in_json_and_readable_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    for log_format in ("json", "text"):
        logs.configure("x", "info", log_format)
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("a").exception("failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert "ValueError: odd" in json.loads(first)["exception"]
    assert rest[-1] == f"{logs.BAR}ValueError: odd"


def test_configuring_twice_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("x", "info", "text")
    logs.configure("x", "info", "text")
    logging.getLogger("a").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_a_cancelled_handler_is_not_reported_as_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("test", "info", "text")
    log = logging.getLogger("grpc._cython.cygrpc")
    log.error("handler ended", exc_info=asyncio.CancelledError())
    log.error("handler broke", exc_info=ValueError("x"))
    printed = capsys.readouterr().err
    assert "handler ended" not in printed
    assert "handler broke" in printed


def test_a_line_about_a_request_among_many_carries_the_ids_of_its_span(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("x", "info", "json")
    for number in range(logs.MAX_TRACED + 10):
        logs.traced(f"req-{number}", SpanContext(number + 1, 7, is_remote=False))
    for name in ("req-0", f"req-{logs.MAX_TRACED + 9}", "req-unknown"):
        logging.getLogger("a").warning("moved", extra={"request": name})
    first, last, unknown = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (last["trace_id"], last["span_id"]) == (f"{logs.MAX_TRACED + 10:032x}", f"{7:016x}")
    assert "trace_id" not in first, "only the last few thousand are kept"
    assert "trace_id" not in unknown
    assert len(logs._traced) == logs.MAX_TRACED
