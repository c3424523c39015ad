from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from services.common.packages.engines import SGLANG, VLLM, VLLM_CPU
from tests.support.repository import ROOT

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


OPTIONAL = {
    *("vllm", "sglang", "torch", "transformers", "safetensors", "llguidance", "smg_grpc_proto"),
    *("zmq", "msgspec", "httpx", "fastokens", "grpc_reflection"),
}
"""Packages of engines and of extras that a service runs without."""


def _imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, inside functions too; those for type checkers only are left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def _file_of(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@pytest.mark.parametrize("service", SERVICES)
def test_image_of_a_service_has_every_package_that_its_code_imports(service: str) -> None:
    waiting = [*(ROOT / "services" / service).rglob("*.py")]
    seen: set[Path] = set()
    packages: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in _imports(path):
            top = module.partition(".")[0]
            if top in ("services", "sluice"):
                if (file := _file_of(module)) is not None:
                    waiting.append(file)
            elif top not in sys.stdlib_module_names and top not in OPTIONAL:
                packages.setdefault(top, str(path.relative_to(ROOT)))
    pinned = {name.replace("-", "_") for name, _ in pins(ROOT / f"requirements/{service}.txt")}
    distributions = packages_distributions()
    missing = {
        top: path
        for top, path in packages.items()
        if not {name.lower().replace("-", "_").replace(".", "_") for name in distributions.get(top, [top])} & pinned
    }
    assert missing == {}, "add them to the service's extra in pyproject.toml, and run `make lock`"


def test_the_suite_gets_what_every_service_gets() -> None:
    everything = pins(ROOT / "requirements/all.txt")
    for service in SERVICES:
        assert pins(ROOT / f"requirements/{service}.txt") <= everything, "run `make lock`"


DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]


def stage(name: str) -> str:
    """The lines of one stage of the Dockerfile."""
    return next(part for part in re.split(r"(?m)^(?=FROM )", DOCKERFILE) if re.match(rf"FROM \S+ AS {name}\n", part))


@pytest.mark.parametrize("service", SERVICES)
def test_image_runs_unprivileged_with_a_health_check(service: str) -> None:
    lines = stage(service)
    assert "USER 10001:10001" in lines
    assert f"requirements/{service}.txt" in lines
    assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in lines
    assert "HEALTHCHECK" in lines
    assert lines.index("USER") > lines.rindex("RUN"), "what is installed belongs to root"


def test_whatever_an_image_installs_is_pinned() -> None:
    for line in re.findall(r"pip (?:install|wheel)[^\n]*", DOCKERFILE):
        assert "--require-hashes" in line or "--no-deps" in line


@pytest.mark.parametrize("name", [*SERVICES, "redis"])
def test_a_container_can_do_no_more_than_it_must(name: str) -> None:
    container = COMPOSE[name]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "network_mode"} & container.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_be_scaled(name: str) -> None:
    container = COMPOSE[name]
    assert "container_name" not in container
    assert name == "gateway" or "ports" not in container
    assert container["build"]["target"].partition("${")[0] == name
    assert container["scale"].endswith(":-1}")


def test_only_the_gateway_is_reachable_unless_a_profile_is_asked_for_and_only_from_this_machine() -> None:
    published = {name: container["ports"] for name, container in COMPOSE.items() if "ports" in container}
    assert [name for name in published if "profiles" not in COMPOSE[name]] == ["gateway"]
    assert all(port.startswith("${SLUICE_BIND:-127.0.0.1}:") for ports in published.values() for port in ports)


def test_engine_versions_of_images_extras_and_pins_equal_the_checked_ones() -> None:
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm=={VLLM}"]
    for file in ("deploy/docker/Dockerfile", "deploy/compose/compose.yaml"):
        assert set(re.findall(r"vllm-openai:v([\d.]+)", (ROOT / file).read_text())) == {VLLM}
    for name, package, version in (
        ("vllm", "vllm", VLLM),
        ("vllm-cpu", "vllm-cpu", VLLM_CPU),
        ("sglang", "sglang", SGLANG),
    ):
        assert f"{package}=={version}" in (ROOT / "requirements" / "engines" / f"{name}.txt").read_text().splitlines()
    page = (ROOT / "docs" / "engines-vllm.md").read_text()
    assert f"vLLM {VLLM}" in page
    assert VLLM_CPU in page
    assert f"SGLang {SGLANG}" in (ROOT / "docs" / "engines.md").read_text()
