"""The pages of docs made from the code match it, and the settings page lists every flag and variable."""

from __future__ import annotations

import ast
import re

import pytest
import typer
from sluice_client import Reservation, RouterClient

from scripts.pages import errors, limits, settings
from scripts.pages.__main__ import DOCS, PAGES
from services.common.base import budgets
from services.common.base.errors import ErrorKind
from services.gateway.apis.responses import redis_store
from services.gateway.http import socket_protocol
from sluice.cli.commands import app
from sluice.v1 import router_pb2
from tests.support.repository import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_page_matches_the_code(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text("utf-8") == PAGES[name](), "run `python -m scripts.pages --write`"


@pytest.mark.parametrize("service", settings.SERVICES)
def test_page_has_every_setting_of_a_service_with_its_variable(service: str) -> None:
    page = settings.page()
    for name, field in settings.SERVICES[service].model_fields.items():
        if not field.description:
            continue  # not a flag
        flag = f"`--{name.replace('_', '-')}`"
        variables = (f"`SLUICE_{service.upper()}_{name.upper()}`", f"`SLUICE_SERVICE_{name.upper()}`")
        assert any(f"| {flag} | {variable} |" in page for variable in variables), name


def test_fields_without_a_description_are_no_flags() -> None:
    for kind in settings.SERVICES.values():
        assert {name for name, field in kind.model_fields.items() if not field.description} <= {"engine_flags"}


def test_page_has_every_command_and_its_flags() -> None:
    listed = settings.commands()
    assert "sluice keys create" in listed
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None) or {"": command}
        for word, one in inner.items():
            _, flags = listed[f"sluice {name} {word}".strip()]
            shown = {flag for setting in flags for flag in setting.flag.split(", ")}
            assert {flag for param in one.params for flag in param.opts if flag.startswith("--")} - {"--help"} <= shown


def test_bounds_choices_and_defaults_are_shown() -> None:
    page = settings.page()
    assert "| `--trace-sample` | `SLUICE_SERVICE_TRACE_SAMPLE` | `0` |" in page
    assert "at least 0, at most 1" in page
    assert "one of `kv`, `round_robin`" in page
    assert "| `--open-health` | `SLUICE_SERVICE_OPEN_HEALTH` | `on` |" in page


def test_secrets_have_no_default_on_the_page() -> None:
    assert "**********" not in settings.page()


def test_every_kind_of_error_has_an_action() -> None:
    assert errors.ACTIONS.keys() == {kind.name for kind in ErrorKind}


@pytest.mark.parametrize("area", errors.AREAS)
def test_every_message_is_a_sentence(area: str) -> None:
    rows = errors.collect(area)
    assert rows
    assert [row.message for row in rows if not row.message.rstrip('"`').endswith((".", "…", "?", "!"))] == []


def test_collector_reads_templates_codes_and_kinds() -> None:
    source = """
def check(name):
    said = f"Model {name!r} is not served; "
    raise not_found(f"Model {name!r} is not " "served.", param="model", code="model_not_found")
    raise SluiceError(ErrorKind.TOO_LARGE, "Too large.", code="request_too_large")
    raise unavailable(said)
"""
    assert sorted(errors._of_module(ast.parse(source))) == [
        (404, "NOT_FOUND", "model_not_found", "Model … is not served."),
        (413, "TOO_LARGE", "request_too_large", "Too large."),
        (503, "UNAVAILABLE", "", "Model … is not served; "),
    ]


def test_every_bound_has_a_docstring_that_says_what_it_counts() -> None:
    assert limits.undocumented() == []


def test_bounds_of_a_module_are_read_with_value_unit_and_effect() -> None:
    source = '''
MAX_BYTES = 4 << 20
"""Bytes of a message; a longer one
is refused.

More about it.
"""
MIN_PAUSE_S = 0.5
"""Seconds between two messages."""
_MAX_DEPTH = 8
MAX_A, MAX_B = 1, 2
"""Describes neither."""
USUAL = 4
'''
    assert [limit[1:] for limit in limits.limits_in(source, "module")] == [
        ("MAX_BYTES", "4 MiB", "Bytes of a message", "a longer one is refused"),
        ("MIN_PAUSE_S", "0.5", "Seconds between two messages", ""),
        ("_MAX_DEPTH", "", "", ""),
        ("MAX_A", "", "", ""),
        ("MAX_B", "", "", ""),
    ]


@pytest.mark.parametrize(
    ("area", "name", "value"),
    [
        ("services/gateway", "MAX_FRAME_BURST", f"{socket_protocol.MAX_FRAME_BURST:,}"),
        ("services/gateway", "MAX_PENDING_WRITES_PER_OWNER", f"{redis_store.MAX_PENDING_WRITES_PER_OWNER:,}"),
        ("services/common", "MAX_CARD_BYTES", "2 MiB"),
    ],
)
def test_bound_has_the_value_that_runs(area: str, name: str, value: str) -> None:
    assert [limit.value for limit in limits.constants(area) if limit.name == name] == [value]


PAGE = (ROOT / "docs/embedding-the-router.md").read_text()


def test_page_shows_the_code_of_the_example() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert shown in (ROOT / "examples/scheduler/scheduler.py").read_text()
    for call in ("query_prefill", "query_decode", "add_request", "mark_prefill_complete", "free_request"):
        assert f"async def {call}(" in shown


def test_page_maps_every_call_to_something_that_exists() -> None:
    table = PAGE.partition("| call | RPC |")[2].partition("\n\n")[0]
    calls = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert calls == [
        "create", "query_prefill", "query_decode", "is_disaggregated",
        "add_request", "mark_prefill_complete", "free_request",
    ]  # fmt: skip
    rpcs = router_pb2.DESCRIPTOR.services_by_name["Router"].methods_by_name
    for name in ("RouteQuery", "AddRequest", "MarkPrefillComplete", "FreeRequest"):
        assert f"`{name}`" in table
        assert name in rpcs
    for method in re.findall(r"`router\.(\w+)\(", table):
        assert hasattr(RouterClient, method)
    for method in re.findall(r"`reservation\.(\w+)\(", table):
        assert hasattr(Reservation, method)
    answer = router_pb2.RouteQueryResponse.DESCRIPTOR.fields_by_name
    assert {"prefill", "decode", "token_ids", "block_hashes", "hash_scheme", "block_size"} <= set(answer)


NAMED = re.compile(r"`(test_\w+)`")
DEFINED = re.compile(r"^(?:async )?def (test_\w+)", re.M)


def threats() -> list[list[str]]:
    """The rows of the table, as cells."""
    section = (ROOT / "docs/security.md").read_text().split("\n## Threats\n")[1].split("\n#")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]  # after the head and the line below it


def defined() -> dict[str, set[str]]:
    """Names of the tests in each file of tests/security."""
    files = (ROOT / "tests/security").glob("test_*.py")
    return {file.name: set(DEFINED.findall(file.read_text())) for file in files}


def test_threat_has_who_what_why_and_a_test_that_exists() -> None:
    known = set().union(*defined().values())
    rows = threats()
    assert len(rows) >= 20
    for row in rows:
        assert len(row) == 4, row
        assert all(cell.strip() for cell in row), row
        named = set(NAMED.findall(row[3]))
        assert named, row
        assert named <= known, named - known


def test_security_file_has_a_test_in_the_threat_table() -> None:
    named = {name for row in threats() for name in NAMED.findall(row[3])}
    assert not [file for file, tests in defined().items() if not tests & named]


def test_every_budget_has_a_row_with_a_setting_that_exists() -> None:
    section = (ROOT / "docs/security.md").read_text().split("\n## Budgets\n")[1].split("\n#")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == set(budgets.NAMES)
    flags = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/settings.md").read_text()))
    for row in rows:
        settings = re.findall(r"`(--[a-z-]+)`", row[1])
        assert settings or row[1].strip().startswith(("fixed", "none")), row
        assert set(settings) <= flags, set(settings) - flags


def test_every_code_has_one_status() -> None:
    statuses: dict[str, set[int]] = {}
    for row in (row for area in errors.AREAS for row in errors.collect(area) if row.code):
        statuses.setdefault(row.code, set()).add(row.status)
    assert {code: found for code, found in statuses.items() if len(found) > 1} == {}
    assert (statuses["overloaded"], statuses["rate_limit_exceeded"]) == ({503}, {429})
