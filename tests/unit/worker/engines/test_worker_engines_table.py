"""docs/engines.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.contract.capabilities import Capability
from services.worker.engines.mock import MockEngine
from services.worker.engines.table import BEGIN, END, built_in_engines, table, with_table, write
from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "engines.md"


def test_the_documented_table_is_the_one_of_the_code() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert with_table(text) == text, "run `sluice engines --write docs/engines.md`"


def test_every_capability_has_a_line_and_every_engine_a_column() -> None:
    engines = built_in_engines()
    lines = table(engines).splitlines()
    assert lines[0] == "| capability | " + " | ".join(engines) + " |"
    for capability in Capability:
        assert sum(line.startswith(f"| `{capability}` |") for line in lines) == 1


@pytest.mark.parametrize(("capability", "cell"), [("seed", "yes"), ("top_p", "no effect"), ("guided_grammar", "–")])
def test_cell_is_honoured_ignored_or_refused(capability: str, cell: str) -> None:
    assert f"| `{capability}` | {cell} |" in table({"mock": MockEngine})


def test_writing_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "engines.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "utf-8")
    assert write(file)
    text = file.read_text("utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert not write(file)
