"""The Redis of the Kubernetes overlays, started in a container by the commands of the manifests."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.net.ports import free_port
from sluice.cli.certs import Options, make
from tests.support.oracles.kustomized import container_of, of_kind

pytestmark = pytest.mark.compose


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module", params=["mock", "guarded"])
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The name of the container, and the manifest's."""
    (workload,) = of_kind(request.param, "StatefulSet")
    wanted = container_of(workload)
    folder = tmp_path_factory.mktemp("redis")
    make(folder / "made", Options(names=("redis",)))
    mounts = {"tls": folder / "tls", "password": folder / "password"}
    for path in mounts.values():
        path.mkdir()
    for name, as_mounted in (("redis.pem", "tls.crt"), ("redis.key", "tls.key"), ("ca.pem", "ca.crt")):
        shutil.copy(folder / "made" / name, mounts["tls"] / as_mounted)
        (mounts["tls"] / as_mounted).chmod(0o444)
    (mounts["password"] / "sluice_router_redis_password").write_text("0123abcd")
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)  # pytest's folders are for their owner, and the container runs as another user
    name = f"sluice-test-redis-{free_port()}"
    flags = [
        f"--volume={mounts[one['name']]}:{one['mountPath']}:ro"
        for one in wanted["volumeMounts"]
        if one["name"] in mounts
    ]
    started = _docker(
        *("run", "--detach", "--name", name, "--user", "999:999", "--read-only", "--cap-drop", "ALL"),
        *("--tmpfs", "/data:uid=999", *flags, "--entrypoint", wanted["command"][0], wanted["image"]),
        *(*wanted["command"][1:], *wanted["args"]),
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    yield name, wanted
    _docker("rm", "--force", name)


def test_image_is_ready_by_its_own_probe_and_rejects_other_callers(redis: tuple[str, Any]) -> None:
    name, wanted = redis
    deadline = time.monotonic() + 60
    while _docker("exec", name, *wanted["readinessProbe"]["exec"]["command"]).returncode != 0:
        assert time.monotonic() < deadline, _docker("logs", name).stdout[-2000:]
        time.sleep(0.5)
    assert "PONG" not in _docker("exec", name, "redis-cli", "ping").stdout
    assert "PONG" not in _docker("exec", name, "timeout", "9", "redis-cli", "--tls", "--insecure", "ping").stdout
