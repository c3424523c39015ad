"""Runs the blocks of a page as a newcomer would, in a folder of their own and on ports that are free.

Commands that start a service (``sluice up``, ``make run``, ``sluice worker``, ``python -m services.…``) run beside the
others until the page ends, and the next command waits until they serve. Ports that a page names are replaced by the
walk's own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.net.ports import free_port, problem
from tests.walk.pages import ROOT, Block, commands_of

COMMAND_S = 180.0
READY_S = 240.0
STOP_S = 20.0
LINKED = ("Makefile", "clients", "deploy", "docs", "pyproject.toml", "requirements", "scripts", "services", "sluice")
"""What commands of the pages name of the checkout, and only read. Examples are copied: some commands build in them."""
SUITE_PORTS = {50051: 0, 50052: 1, 50053: 2, 50061: 10, 50062: 11}
"""Ports of the services of a suite as pages name them, and their distance from its base port."""
GATEWAY = 8000
SERVICES = ("gateway", "preprocess", "router", "postprocess", "worker")

_PORT = re.compile(r"\b(127\.0\.0\.1|localhost):(\d{4,5})\b")
_ASSIGNMENT = re.compile(r"^(?:[A-Z][A-Z0-9_]*=\S*\s+(?:\\\n\s*)?)*")
_LISTEN = re.compile(r"--listen[ =](\S+)")
_READY = re.compile(r"^ready (https?)://", re.MULTILINE)


class Failed(Exception):
    """A command of a page does not work; the text has the command and what it printed."""


@dataclass
class Suite:
    """Where a whole suite listens: the gateway's port, and the first of its services'."""

    port: int = field(default_factory=free_port)
    base: int = 0

    def __post_init__(self) -> None:
        self.base = self.base or _free_base()

    def ports(self) -> dict[int, int]:
        """The ports that pages name, and those of this suite."""
        return {GATEWAY: self.port, **{port: self.base + offset for port, offset in SUITE_PORTS.items()}}

    def flags(self) -> str:
        """What `sluice up` has to be told beyond the page's flags."""
        return f"--port {self.port} --base-grpc-port {self.base} --workers 1"


class Server:
    """A command that serves until it is stopped.

    Args:
        command: for messages.
        script: what is run, with what comes before the command.
    """

    def __init__(self, command: str, script: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.command = command
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it printed until now."""
        return self._log.read_text("utf-8", errors="replace")

    def wait_ready(self, address: str) -> None:
        """Waits until it serves: as `sluice up` prints it, or by the health of its address. Raises Failed."""
        deadline = time.monotonic() + READY_S
        while not (_serves(address) if address else _READY.search(self.output)):
            if self._process.poll() is not None:
                raise Failed(f"{self.command}\nended with {self._process.returncode}:\n{self.output[-4000:]}")
            if time.monotonic() > deadline:
                raise Failed(f"{self.command}\nis not ready after {READY_S:.0f} s:\n{self.output[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends it and what it started."""
        for how in (signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, how)
                try:
                    self._process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    continue


class Walk:
    """One page, or several that belong together, from the first command to the last.

    Args:
        folder: of its own; has links to what the pages name of the checkout.
        suite: one that runs already and that the page's ports mean; None: the page starts what it needs.
    """

    def __init__(self, folder: Path, suite: Suite | None = None) -> None:
        self._folder = folder
        self._ports = {} if suite is None else suite.ports()
        self._shared = suite is not None
        self.suite = suite
        self._servers: list[Server] = []
        self._home = folder / ".walk"
        self._state = self._home / "state"
        self._prepare()
        self._environment = _environment(self._home)

    def run(self, block: Block) -> None:
        """Runs a block; Failed with the place in the page when one of its commands does not work."""
        try:
            if block.kind == "file":
                self._write(block)
            elif block.kind == "python":
                script = self._home / "block.py"
                script.write_text(self._replaced(block.text), "utf-8")
                self._run(f"python {shlex.quote(str(script))}")
            else:
                for command in commands_of(block):
                    self.command(command)
        except Failed as failure:
            raise Failed(f"{block.place}: {failure}") from None

    def command(self, command: str) -> None:
        """Runs one command, or starts it when it serves; Failed when it does not work."""
        words = _words(command)
        if _begins(words, "make"):
            command = command.replace("make", f"make -C {shlex.quote(str(ROOT))}", 1)
        if _is_server(words):
            self._serve(command, words)
        else:
            self._run(self._replaced(command))

    def close(self) -> None:
        """Ends what runs."""
        for server in reversed(self._servers):
            server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self) -> None:
        """Links, examples to build in, an environment that `pip install` may change, and programs of the walk's own."""
        for name in LINKED:
            (self._folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "examples", self._folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        programs = self._home / "bin"
        programs.mkdir(parents=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(self._home / "venv")], check=True, capture_output=True
        )
        (_packages(self._home) / "walk.pth").write_text(str(_packages_of_tests()))
        python = self._home / "venv" / "bin" / "python"
        stand_in = ROOT / "tests" / "support" / "clients" / "grpcurl.py"
        scripts = {
            "pip": f'exec {shlex.quote(str(python))} -m pip "$@"',
            "grpcurl": f'exec {shlex.quote(sys.executable)} {shlex.quote(str(stand_in))} "$@"',
        }
        for name, script in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        (self._home / ".curlrc").write_text("fail-with-body\nshow-error\nno-progress-meter\n")

    def _write(self, block: Block) -> None:
        file = self._folder / block.path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent != self._folder and file.suffix == ".py":
            (file.parent / "__init__.py").touch()
        file.write_text(block.text, "utf-8")

    def _serve(self, command: str, words: Sequence[str]) -> None:
        if _begins(words, "sluice", "up") or _begins(words, "make", "run"):
            if self._shared:
                return  # this suite runs already
            for server in self._servers:
                server.stop()
            self.suite = suite = Suite()
            self._ports = suite.ports()
            command = _with_flags(_bare(command), suite.flags())
            address, listens = "", ""
        else:
            address, listens = self._address(command)
        command = self._replaced(_bare(command))
        log = self._home / f"server-{len(self._servers)}.log"
        script = f"{self._before()}\n{listens}\n{command}"
        server = Server(command, script, self._folder, self._environment, log)
        self._servers.append(server)
        server.wait_ready(address)

    def _address(self, command: str) -> tuple[str, str]:
        """Where a single service will listen, on a port of its own, and what tells it where the command does not."""
        port = free_port()
        address = f"127.0.0.1:{port}"
        if named := _LISTEN.search(command):
            self._ports[int(named[1].rpartition(":")[2])] = port
            return address, ""
        return address, "\n".join(f"export SLUICE_{service.upper()}_LISTEN={address}" for service in SERVICES)

    def _run(self, command: str) -> None:
        after = f"code=$?\nexport -p > {self._state}\npwd > {self._state}.folder\nexit $code"
        script = f"{self._before()}\n{command}\n{after}"
        try:
            done = subprocess.run(
                ["bash", "-c", f"set -o pipefail\n{script}"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{command}\ndoes not end within {COMMAND_S:.0f} s") from None
        if done.returncode != 0:
            raise Failed(f"{command}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _before(self) -> str:
        """The variables and the folder that earlier commands of the page left behind."""
        return f'set -a\n[ ! -f {self._state} ] || {{ . {self._state}; cd "$(cat {self._state}.folder)"; }}'

    def _replaced(self, text: str) -> str:
        """The text with this walk's ports in place of the page's."""

        def own(match: re.Match[str]) -> str:
            port = int(match[2])
            if port not in self._ports:
                self._ports[port] = free_port()
            return f"{match[1]}:{self._ports[port]}"

        return _PORT.sub(own, text)


def _words(command: str) -> list[str]:
    """The words of a command, without variables before it and without what does not belong to its first part."""
    bare = _ASSIGNMENT.sub("", command)
    try:
        words = shlex.split(bare, comments=True)
    except ValueError:
        return bare.split()
    ends = [place for place, word in enumerate(words) if word in ("|", "&&", "&", ";", ">")]
    return words[: ends[0] if ends else None]


def _begins(words: Sequence[str], *wanted: str) -> bool:
    return tuple(words[: len(wanted)]) == wanted


def _is_server(words: Sequence[str]) -> bool:
    if "--help" in words:
        return False
    if _begins(words, "sluice", "up") or _begins(words, "sluice", "worker") or _begins(words, "make", "run"):
        return True
    return _begins(words, "python", "-m") and len(words) > 2 and words[2] in {f"services.{name}" for name in SERVICES}


def _bare(command: str) -> str:
    """A command without its comment and without the `&` that sends it to the background."""
    return re.sub(r"\s#.*", "", command).rstrip(" &\n")


def _with_flags(command: str, flags: str) -> str:
    """`sluice up`, or the `make run` that starts it, with more flags."""
    if 'ARGS="' in command:
        return command.replace('ARGS="', f'ARGS="{flags} ')
    return f'{command} ARGS="{flags}"' if " run" in command and "sluice up" not in command else f"{command} {flags}"


def _serves(address: str) -> bool:
    try:
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _free_base() -> int:
    """A base port of which a suite of one worker finds all ports free."""
    while True:
        base = free_port()
        if base < 60_000 and all(_is_free(base + offset) for offset in SUITE_PORTS.values()):
            return base


def _is_free(port: int) -> bool:
    return not problem("127.0.0.1", port)


def _packages(home: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return home / "venv" / "lib" / version / "site-packages"


def _packages_of_tests() -> Path:
    return Path(grpc.__file__).parents[1]


def _environment(home: Path) -> dict[str, str]:
    """Nothing of this machine's settings but where programs are; no package index."""
    programs = os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    packages = os.pathsep.join([str(_packages(home)), str(ROOT / "clients/python/src")])  # the client, as if installed
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "PATH": programs,
        "HOME": str(home),
        "CURL_HOME": str(home),
        "PYTHONPATH": packages,
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "SLUICE_WORKER_SPEEDUP": "50",
    }
