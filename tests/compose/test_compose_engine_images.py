"""The workers' images for accelerators, built on a stand-in of the engine's image: no engine is here."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.repository import ROOT
from tests.support.servers.compose_suite import TAG, Suite, standin

pytestmark = pytest.mark.compose
HARDENED = ["--read-only", "--tmpfs", "/tmp:exec", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]


def _docker(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest, built: None) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def image(engine: str) -> str:
    return _built("worker-gpu", "worker", engine)


def _built(target: str, service: str, engine: str) -> str:
    """Builds a target on the stand-in of the engine's image; returns the image's name."""
    name = f"sluice-{service}-{engine}:{TAG}"
    base = f"{engine.upper()}_IMAGE={standin('engine')}"
    command = ["build", "--quiet", "--file", str(ROOT / "deploy/docker/Dockerfile"), "--target", target]
    done = _docker(
        *command, "--build-arg", f"ENGINE={engine}", "--build-arg", base, "--tag", name, str(ROOT), timeout_s=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return name


def test_profile_has_its_worker_and_no_mock_workers(engine: str) -> None:
    profile = Suite(("gpu" if engine == "vllm" else f"gpu-{engine}", "observability"))
    services = json.loads(profile.compose("config", "--format", "json"))["services"]
    worker = services[f"worker-{engine}"]
    assert worker["build"]["args"]["ENGINE"] == engine
    assert worker["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert services["worker"]["scale"] == 0
    assert "prometheus" in services


def test_processing_with_the_engines_code_runs_on_the_engines_image(engine: str) -> None:
    rendered = json.loads(Suite((f"processing/{engine}",)).compose("config", "--format", "json"))["services"]
    for service in ("preprocess", "postprocess"):
        given = rendered[service]["environment"]
        assert given[f"SLUICE_{service.upper()}_{engine.upper()}_PROCESSING"] == "true"
        assert rendered[service]["build"]["target"] == f"{service}-engine"
        assert rendered[service]["build"]["args"]["ENGINE"] == engine
        assert rendered[service]["image"].startswith(f"sluice-{service}-{engine}:")
        built = _built(f"{service}-engine", service, engine)
        shown = _docker("run", "--rm", *HARDENED, built, "--help")
        assert f"python -m services.{service}" in shown.stdout, shown.stderr
        refused = _docker("run", "--rm", *HARDENED, built, "--trtllm-processing")
        assert refused.returncode == 2
        assert "TensorRT-LLM" in refused.stderr


def _python(image: str, code: str) -> str:
    done = _docker("run", "--rm", *HARDENED, "--entrypoint", "python3", image, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_packages_of_the_engine_are_used_and_the_workers_are_found(image: str, engine: str) -> None:
    code = f"import {engine}, filelock; assert {engine}.OF_THE_ENGINE and filelock.OF_THE_ENGINE; import grpc, uvloop; "
    assert _python(image, code + "print(grpc.__file__)").startswith("/opt/sluice/")


def test_models_may_be_written_and_nothing_else(image: str) -> None:
    code = "import os; print(os.getuid(), os.environ['HF_HOME'], os.stat('/models').st_uid)"
    assert _python(image, code) == "10001 /models 10001"


@pytest.fixture
def worker(image: str) -> Iterator[str]:
    """A worker of the image that runs the mock engine."""
    started = _docker("run", "--detach", *HARDENED, "--env", "SLUICE_WORKER_ENGINE=mock", image)
    assert started.returncode == 0, started.stderr
    container = started.stdout.strip()
    yield container
    _docker("rm", "--force", container)


def test_worker_of_the_image_serves(worker: str) -> None:
    deadline = time.monotonic() + 90
    while _docker("inspect", "--format", "{{.State.Health.Status}}", worker).stdout.strip() != "healthy":
        assert time.monotonic() < deadline, _docker("logs", worker).stderr[-2000:]
        time.sleep(1)


def test_image_without_its_engine_fails_with_a_message(image: str, engine: str) -> None:
    done = _docker("run", "--rm", *HARDENED, image, timeout_s=120)
    assert done.returncode != 0
    assert engine in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
