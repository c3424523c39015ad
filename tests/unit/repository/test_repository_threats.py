"""The threat table of docs/security.md names tests that exist, and every file of tests/security has one there."""

from __future__ import annotations

import re

from tests.support.repository import ROOT

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
