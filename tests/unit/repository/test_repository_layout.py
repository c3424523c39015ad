from __future__ import annotations

import filecmp
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SERVICES = ["gateway", "preprocess", "router", "postprocess", "worker"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_folder_shows_where_to_start(service: str) -> None:
    wanted = {"__init__.py", "__main__.py", "settings.py", "metrics.py"}
    assert wanted <= {path.name for path in (ROOT / "services" / service).iterdir()}


@pytest.mark.parametrize("service", [*SERVICES, "common"])
def test_service_root_has_at_most_twelve_entries(service: str) -> None:
    root = ROOT / "services" / service
    entries = {path.name for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len(entries - {"__init__.py"}) <= 12, sorted(entries)


def test_module_under_forty_lines_has_a_reason() -> None:
    one_each = ROOT / "services/postprocess/parsers/families"
    reasons = {
        "services/common/base/shared_steps.py": "is imported by every service, down to child processes",
        "services/common/discovery/handoff_forms.py": "is shared by router and gateway",
        "services/gateway/admission/tenants.py": "is the gateway's own part of the salts of tenants",
        "services/gateway/apis/anthropic/call_ids.py": "is shared by streamed and complete messages",
        "services/common/apis/tool_definitions.py": "is shared by two APIs",
        "services/gateway/http/degradation.py": "is shared by whole and streamed responses",
        "services/gateway/http/middleware/hosts.py": "each middleware has a module of its own",
        "services/gateway/core/deaths.py": "is shared by streams and the calls of embeddings",
        "services/gateway/streams/migration_policy.py": "keeps gRPC out of the settings' imports",
        "services/preprocess/templates/open_thought.py": "is shared with workers that tokenize",
        "services/worker/engines/vllm/events.py": "each engine has its events in a module of its own",
        "sluice/conformance/exceptions.py": "is imported by the rules' registry and by what rules use",
        "sluice/cli/errors.py": "is imported by every command",
        "sluice/cli/main.py": "is the entry point, and loads commands lazily",
        "sluice/cli/private_files.py": "is shared by two commands",
        "sluice/conformance/patience.py": "is shared by the kit and its rules, which do not import each other",
        "sluice/parsers.py": "is a published import path",
        "sluice/policies.py": "is a published import path",
        "sluice/tokenizers.py": "is a published import path",
    }
    small = {
        str(path.relative_to(ROOT))
        for top in ("services", "sluice")
        for path in (ROOT / top).rglob("*.py")
        if not path.name.startswith("__")
        and "pb2" not in path.name
        and path.parent != one_each
        and path.read_text().count("\n") < 40
    }
    assert small == reasons.keys()


def test_layers_of_every_service_are_stated_in_full() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layered = {c["containers"][0]: c for c in linter["contracts"] if c["type"] == "layers" and "containers" in c}
    assert {f"services.{service}" for service in [*SERVICES, "common"]} <= layered.keys()
    assert all(contract["exhaustive"] for contract in layered.values())


def test_every_file_a_service_reads_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = ["*.py", *setuptools["package-data"]["*"]]
    files = [path for top in ("services", "sluice") for path in (ROOT / top).rglob("*") if path.is_file()]
    left_out = [
        str(path.relative_to(ROOT))
        for path in files
        if "__pycache__" not in path.parts and not any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    assert left_out == [], "add a pattern to [tool.setuptools.package-data]"


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for top in ("services", "sluice") for path in (ROOT / top).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


CLI = Path(sys.executable).with_name("sluice")


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-m", "services.router", "--help"),
        (sys.executable, "-m", "sluice.cli.main", "version"),
        (str(CLI), "version"),
    ],
)
def test_command_above_a_clone_called_sluice_runs(command: tuple[str, ...], tmp_path: Path) -> None:
    clone = tmp_path / "sluice"  # as of `git clone …/sluice`: without an __init__.py of its own
    (clone / "sluice").mkdir(parents=True)
    (clone / "README.md").write_text("a clone")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts/protos.sh", tmp_path], check=True, capture_output=True, text=True)
    fresh = {path.name for path in (tmp_path / "sluice/v1").iterdir()}
    kept = {path.name for path in (ROOT / "sluice/v1").iterdir() if path.is_file() and path.name != "py.typed"}
    assert kept == fresh, "run `make protos`"
    _, stale, unreadable = filecmp.cmpfiles(ROOT / "sluice/v1", tmp_path / "sluice/v1", fresh, shallow=False)
    assert (stale, unreadable) == ([], []), "run `make protos`"
