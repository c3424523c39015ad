"""Defects that can be put back (`parser_defects`) still fit the code, and the document names them."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.support.data.parser_defects import DEFECTS, Defect, put_back
from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "parsers.md"


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS.keys())
def test_a_defect_can_be_put_back_and_has_a_test(defect: Defect, tmp_path: Path) -> None:
    file = tmp_path / defect.file
    file.parent.mkdir(parents=True)
    shutil.copy(ROOT / defect.file, file)
    put_back(defect, tmp_path)
    ast.parse(file.read_text("utf-8"))
    where, _, name = defect.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / where).read_text("utf-8")


def test_changed_code_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("something else")
    with pytest.raises(ValueError, match="does not have once"):
        put_back(Defect("", "file.py", "good", "bad", ""), tmp_path)


def test_the_document_has_every_defect_and_its_test() -> None:
    text = DOCUMENT.read_text("utf-8")
    for defect in DEFECTS.values():
        assert defect.test.partition("::")[2].partition("[")[0] in text, defect.what
