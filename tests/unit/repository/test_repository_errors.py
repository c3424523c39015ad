"""docs/errors.md lists every error, as the code raises it."""

import ast

import pytest

from services.common.errors import ErrorKind
from sluice import errors


def test_errors_page_matches_the_code() -> None:
    assert errors.PAGE.read_text("utf-8") == errors.page(), "run `python -m sluice.errors --write`"


def test_every_kind_of_error_has_an_action() -> None:
    assert errors.ACTIONS.keys() == {kind.name for kind in ErrorKind}


@pytest.mark.parametrize("area", errors.AREAS)
def test_every_message_is_a_sentence(area: str) -> None:
    rows = errors.collect(area)
    assert rows
    assert [row.message for row in rows if not row.message.rstrip('"`').endswith((".", "…", "?", "!"))] == []


def test_every_code_has_one_status() -> None:
    statuses: dict[str, set[int]] = {}
    for row in (row for area in errors.AREAS for row in errors.collect(area) if row.code):
        statuses.setdefault(row.code, set()).add(row.status)
    assert {code: found for code, found in statuses.items() if len(found) > 1} == {}
    assert (statuses["overloaded"], statuses["rate_limit_exceeded"]) == ({503}, {429})


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
