"""The scripts of Compose's Redis, run as they are: what they start asks for the password that was made."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis

from services.common.net.ports import free_port
from tests.support.repository import ROOT

SCRIPTS = ROOT / "deploy/compose/redis"
NAMES = ("sluice_router_redis_password", "sluice_router_redis_sentinel_password")


class Container:
    """A folder that stands for the file system of a container; its scripts see no other."""

    def __init__(self, folder: Path, secrets: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._secrets = secrets
        commands = folder / "bin"
        commands.mkdir(parents=True)
        (folder / "data").mkdir()
        (folder / "tmp").mkdir()
        for name, said in (("getent", "127.0.0.1 redis"), ("hostname", "127.0.0.1")):
            (commands / name).write_text(f"#!/bin/sh\necho {said}\n")
            (commands / name).chmod(0o755)

    def script(self, name: str, **replaced: str) -> Path:
        """A script with the paths and ports of this folder."""
        places = {name: str(self.folder / name.strip("/")) for name in ("/data", "/tmp")}
        places |= {"/run/secrets": str(self._secrets), **replaced}
        text = (SCRIPTS / name).read_text()
        assert all(old in text for old in replaced)
        text = re.sub("|".join(map(re.escape, places)), lambda match: places[match[0]], text)
        made = self.folder / name
        made.write_text(text)
        return made

    @contextmanager
    def running(self, script: Path) -> Iterator[subprocess.Popen[str]]:
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        process = subprocess.Popen(["sh", str(script)], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "Ready to accept connections" in line or "Sentinel ID is" in line:
                    break
            else:
                pytest.fail(f"{script.name} has ended")
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=20)


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The volume with the password."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    subprocess.run(["sh", str(SCRIPTS / "password.sh"), str(folder)], check=True)
    return folder


def test_password_is_made_once_and_under_the_names_of_the_routers_settings(secrets: Path) -> None:
    made = {path.name: path.read_text() for path in secrets.iterdir()}
    assert set(made) == set(NAMES)
    (password,) = set(made.values())
    assert len(password) == 64
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in secrets.iterdir())
    subprocess.run(["sh", str(SCRIPTS / "password.sh"), str(secrets)], check=True)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == made


@pytest.mark.parametrize("name", ["node.sh", "sentinel.sh"])
def test_server_asks_for_the_password(tmp_path: Path, secrets: Path, name: str) -> None:
    if shutil.which("redis-server") is None:
        pytest.fail("redis-server is not on PATH; scripts/redis.sh installs it.", pytrace=False)
    container = Container(tmp_path / "container", secrets)
    if name == "node.sh":
        changes = {'save ""': f'save ""\nport {container.port}'}
    else:
        changes = {"port 26379": f"port {container.port}", "-p 26379": f"-p {container.port}"}
    script = container.script(name, **changes, **{"-h sentinel": "-h 127.0.0.1"})
    password = (secrets / NAMES[0]).read_text()
    with container.running(script) as process:
        with socket.create_connection(("127.0.0.1", container.port), 20) as stranger:
            stranger.sendall(b"PING\r\n")
            assert stranger.recv(99).startswith(b"-NOAUTH")
        with Redis(port=container.port, password=password) as ours:
            assert ours.ping()
            if name == "node.sh":
                assert ours.config_get("masterauth") == {"masterauth": password}
                assert ours.config_get("appendonly") == {"appendonly": "yes"}
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert password.encode() not in command
        check = container.script("cli.sh")
        asked = ["sh", str(check), "-p", str(container.port), "ping"]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "PONG\n"
