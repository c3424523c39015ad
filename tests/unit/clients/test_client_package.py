"""The client library as a package: fresh, complete, and on its own."""

from __future__ import annotations

import dataclasses
import filecmp
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import betterproto2
import pytest
from sluice_client import methods
from sluice_client._wire.sluice import v1 as generated
from sluice_client.connection import Method

from sluice.v1 import router_pb2, worker_pb2
from tests.support.repository import ROOT

CLIENT = ROOT / "clients/python"
GENERATED = CLIENT / "src/sluice_client/_wire"


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    fresh = tmp_path / "wire"
    subprocess.run([CLIENT / "generate.sh", fresh], check=True, capture_output=True, text=True)
    names = {str(path.relative_to(fresh)) for path in fresh.rglob("*.py")}
    kept = {str(path.relative_to(GENERATED)) for path in GENERATED.rglob("*.py")}
    assert kept == names, "run clients/python/generate.sh"
    _, stale, unreadable = filecmp.cmpfiles(GENERATED, fresh, names, shallow=False)
    assert (stale, unreadable) == ([], []), "run clients/python/generate.sh"


METHODS = [value for value in vars(methods).values() if isinstance(value, Method)]
CONTRACTS = {
    f"/{service.full_name}/{method.name}": method
    for file in (router_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_a_method_is_one_of_the_contracts(method: Method) -> None:  # type: ignore[type-arg]
    contract = CONTRACTS[method.path]
    assert method.request.__name__ == contract.input_type.name
    assert method.answer.__name__ == contract.output_type.name


def test_every_call_for_schedulers_is_there() -> None:
    offered = {method.path.rpartition("/")[2] for method in METHODS if "Router" in method.path}
    for_others = {"Attach", "Session"}  # workers', and gateways', which carries RouteQuery many at a time
    assert offered == {method.name for method in router_pb2.DESCRIPTOR.services_by_name["Router"].methods} - for_others


GENERATED_MESSAGES = [
    value
    for value in vars(generated).values()
    if isinstance(value, type) and issubclass(value, betterproto2.Message) and value is not betterproto2.Message
]


@pytest.mark.parametrize("message", GENERATED_MESSAGES, ids=lambda message: message.__name__)
def test_no_field_hides_a_method_of_its_message(message: type[betterproto2.Message]) -> None:
    assert dataclasses.is_dataclass(message)
    assert {field.name for field in dataclasses.fields(message)} & set(dir(betterproto2.Message)) == set()


NEEDS_NOTHING_OF_THE_SUITE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"grpc", "google", "sluice", "services", "pydantic"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import sluice_client
print(len(sluice_client.block_hashes(range(64), 16)))
"""


def test_it_needs_nothing_of_the_suite_nor_grpcio_nor_protobuf(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", NEEDS_NOTHING_OF_THE_SUITE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CLIENT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (answer.returncode, answer.stdout.strip()) == (0, "4"), answer.stderr


def test_the_version_of_the_library_behind_the_generated_code_is_the_one_asked_for() -> None:
    asked = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]["dependencies"]
    generated = (GENERATED / "sluice/v1/__init__.py").read_text()
    version = generated.partition('_COMPILER_VERSION = "')[2].partition('"')[0].rpartition(".")[0]
    assert any(line.startswith(f"betterproto2>={version},<") for line in asked)


def test_the_example_in_the_readme_is_the_one_that_is_tested() -> None:
    example = (CLIENT / "examples/scheduler.py").read_text()
    assert f"```python\n{example}```" in (CLIENT / "README.md").read_text()
