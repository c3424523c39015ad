import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICES = ["gateway", "preprocess", "router", "postprocess", "worker"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_folder_shows_where_to_start(service: str) -> None:
    wanted = {"__init__.py", "__main__.py", "settings.py", "metrics.py"}
    assert wanted <= {path.name for path in (ROOT / "services" / service).iterdir()}


@pytest.mark.parametrize("service", [*SERVICES, "common"])
def test_service_root_has_at_most_twelve_modules(service: str) -> None:
    modules = [path.name for path in (ROOT / "services" / service).glob("*.py") if not path.name.startswith("__")]
    assert len(modules) <= 12, sorted(modules)


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
