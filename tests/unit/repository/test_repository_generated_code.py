import filecmp
import subprocess
from pathlib import Path

from tests.support.repository import ROOT


def test_generated_code_is_what_the_contracts_say(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts/protos.sh", tmp_path], check=True, capture_output=True, text=True)
    fresh = {path.name for path in (tmp_path / "sluice/v1").iterdir()}
    kept = {path.name for path in (ROOT / "sluice/v1").iterdir() if path.is_file() and path.name != "py.typed"}
    assert kept == fresh, "run `make protos`"
    _, stale, unreadable = filecmp.cmpfiles(ROOT / "sluice/v1", tmp_path / "sluice/v1", fresh, shallow=False)
    assert (stale, unreadable) == ([], []), "run `make protos`"
