"""`sluice extensions`, and what becomes of installed packages that cannot be used."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from services.common.base.errors import SluiceError
from services.router.scheduling.policies.stages import make_stage
from services.worker.engines import find_engine
from services.worker.engines.mock import MockEngine
from sluice.cli import extensions as command
from sluice.cli.doctor.checks import FindingState
from sluice.cli.doctor.checks import extensions as check_extensions
from tests.unit.cli.conftest import Sluice

ENGINE = "from services.worker.engines.mock import MockEngine as Engine\n"
STAGE = "from services.router.scheduling.policies.scorers import LoadScorer as Stage\n"

ABSTRACT = "from services.router.scheduling.policies.contract import Scorer as Stage\nEngine = Stage\n"

CANNOT_BE_LOADED = {
    "absent": ("import absent_package\n", "the module absent_package is not installed; run: pip install {package}"),
    "failing": ("raise RuntimeError('no\\ndevice.')\n", "importing it raised RuntimeError: no device"),
    "exiting": ("raise SystemExit('bye')\n", "importing it raised SystemExit: bye"),
    "ending": ("print('noise')\nimport os\nos._exit(1)\n", "importing it ended the process"),
    "empty": ("", "importing it raised AttributeError: module '{package}_code' has no attribute "),
}

OTHER_CLASSES = {
    "other": ("print('noise')\nEngine = Stage = int\n", "it is not a filter or scorer or picker: derive it from"),
    "abstract": (ABSTRACT, "it lacks the method score"),
}


class Site:
    """A folder of installed packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, package: str, module: str, **groups: str) -> None:
        """Writes a package with one module, and its entry points: a line for each of `engines` and `policies`."""
        (self._folder / f"{package}_code.py").write_text(module)
        metadata = self._folder / f"{package}-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(
            "".join(
                f"[sluice.{group}]\n{name} = {package}_code:{target}\n"
                for group, line in groups.items()
                for name, target in [line.split("=")]
            )
        )
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for package in ("steam", "pools", "well", "water"):
        monkeypatch.delitem(sys.modules, f"{package}_code", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    return Site(tmp_path)


def rows(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """Returns the exit code, and what is wrong with each extension by package."""
    code = sluice("extensions", "--json")
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, {row["distribution"]: row["reason"] for row in json.loads(printed.out) if row["version"] == "1.2"}


def test_extensions_that_can_be_used_are_listed(site: Site, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("steam", ENGINE, engines="steam=Engine")
    site.install("pools", STAGE, policies="pools=Stage")
    _, listed = rows(sluice, capsys)
    assert listed == {"steam": "", "pools": ""}
    assert find_engine("steam") is MockEngine
    assert make_stage("scorer", "pools", {})
    sluice("extensions")
    assert {
        ("sluice.engines", "steam", "steam", "1.2", "usable"),
        ("sluice.policies", "pools", "pools", "1.2", "usable"),
    } <= {tuple(line.split()) for line in capsys.readouterr().out.splitlines()}


def install_both(site: Site, code: str) -> None:
    """Installs the same code as a package with an engine and as one with a stage."""
    site.install("steam", code, engines="boiler=Engine")
    site.install("pools", code, policies="pooled=Stage")


@pytest.mark.parametrize("kind", CANNOT_BE_LOADED)
def test_extension_that_cannot_be_loaded_is_one_sentence_with_its_package(
    kind: str, site: Site, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reason = CANNOT_BE_LOADED[kind]
    install_both(site, code)
    site.install("well", ENGINE, engines="well=Engine")
    exit_code, listed = rows(sluice, capsys)
    assert exit_code == 1
    assert listed.pop("well") == ""
    for package, name in (("steam", "boiler"), ("pools", "pooled")):
        start = f"Extension {name} of {package} cannot be loaded: {reason.format(package=package)}"
        assert re.fullmatch(rf"{re.escape(start)}[^\n]*\.", listed[package])
    if kind != "ending":
        with pytest.raises(SluiceError) as refused:
            find_engine("boiler")
        assert refused.value.message == listed["steam"]
        with pytest.raises(ValueError, match=re.escape(listed["pools"])):
            make_stage("scorer", "pooled", {})


@pytest.mark.parametrize("kind", OTHER_CLASSES)
def test_extension_of_another_class_is_one_sentence(
    kind: str, site: Site, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    code, reason = OTHER_CLASSES[kind]
    install_both(site, code)
    exit_code, listed = rows(sluice, capsys)
    assert exit_code == 1
    assert listed["steam"] == "Engine 'boiler' is steam_code:Engine, which is not a subclass of LLMEngine."
    assert listed["pools"].startswith(f"pooled: {reason}")


def test_name_that_two_packages_register_is_used_by_neither(
    site: Site, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("steam", "water"):
        site.install(package, ENGINE, engines="boiler=Engine")
    exit_code, listed = rows(sluice, capsys)
    sentence = "Extension boiler is registered 2 times, by steam and water: uninstall all but one."
    assert (exit_code, listed) == (1, {"steam": sentence, "water": sentence})
    with pytest.raises(SluiceError) as refused:
        find_engine("boiler")
    assert refused.value.message == sentence


def test_name_of_a_built_in_stays_its_own(site: Site, sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("steam", "Engine = int\n", engines="mock=Engine")
    exit_code, listed = rows(sluice, capsys)
    assert (exit_code, listed) == (1, {"steam": "Extension mock of steam is not used: the suite has a built-in mock."})
    assert find_engine("mock") is MockEngine


def test_import_that_does_not_end_is_ended(
    site: Site, sluice: Sluice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "IMPORT_TIMEOUT_S", 5.0)
    site.install("steam", "import time\ntime.sleep(60)\n", engines="steam=Engine")
    exit_code, listed = rows(sluice, capsys)
    assert exit_code == 1
    assert "takes longer than 5 s" in listed["steam"]


def test_doctor_names_extensions_that_cannot_be_used_and_those_that_can(site: Site) -> None:
    site.install("steam", "import absent_package\n", engines="boiler=Engine")
    site.install("pools", STAGE, policies="pooled=Stage")
    findings = {finding.check: finding for finding in check_extensions()}
    assert "pooled" in findings["extensions"].found
    assert findings["extension boiler"].state is FindingState.WARN
    reason = "the module absent_package is not installed; run: pip install steam"
    assert findings["extension boiler"].found == f"Extension boiler of steam cannot be loaded: {reason}."
    assert not any("pooled" in check for check in findings)
