"""Installs NVIDIA Dynamo from packages and starts its frontend with mock workers, isolated from the network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PORT = 8110
MODEL = "tiny"
READY_WITHIN_S = 120.0
STOPS_WITHIN_S = 15.0
_LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_HTTP_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@dataclass(frozen=True)
class Target:
    """A system under load.

    Attributes:
        prefix: command that runs a client where the system can be reached.
        processes: pid of each process to watch, by name.
    """

    url: str
    prefix: Sequence[str]
    processes: dict[str, int]


def install(folder: Path) -> tuple[Path, Path]:
    """Installs Dynamo and builds the model with its packages, unless done; returns its Python and the model."""
    python = environment(folder / "dynamo", HERE / "peers.txt")
    recipe = HERE / "peer_model.py"
    model = folder / f"model-{hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]}"
    if not (model / "tokenizer.json").exists():
        subprocess.run([python, recipe, model], check=True)
    return python, model


def environment(folder: Path, pins: Path) -> Path:
    """Creates a virtual environment with pinned packages, unless that was done; returns its Python.

    Raises:
        RuntimeError: a package cannot be installed.
    """
    python = folder / "bin/python"
    if not (folder / ".complete").exists():
        print(f"installing {pins.name} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(pins)], check=False).returncode:
            raise RuntimeError(f"pip cannot install the packages of {pins.name}; --peers chooses other peers")
        (folder / ".complete").touch()
    return python


@contextmanager
def namespace() -> Iterator[list[str]]:
    """Creates a network namespace with a loopback interface only; gives the prefix of commands inside it.

    Raises:
        RuntimeError: this user may not create one. Dynamo's event plane listens on all interfaces.
    """
    name = f"sluice-peers-{os.getpid()}"
    prefix = ["ip", "netns", "exec", name]
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or error
        raise RuntimeError(
            "Dynamo listens on all interfaces and therefore runs in a network namespace; run as root, with iproute2 "
            f"installed: {detail}"
        ) from error
    try:
        subprocess.run([*prefix, "ip", "link", "set", "lo", "up"], check=True)
        yield prefix
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def dynamo(python: Path, model: Path, workers: int, speedup: float) -> Iterator[Target]:
    """Runs Dynamo's frontend with its KV router, and mock workers.

    Raises:
        RuntimeError: with the end of its log, when it does not serve in time.
    """
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefix = stack.enter_context(namespace())
        environment, planes = dynamo_environment(state)
        log = state / "log"
        started = []
        for command in (dynamo_frontend(PORT), dynamo_mocker(model, workers, speedup)):
            with log.open("ab") as output:
                whole = [*prefix, str(python), "-m", *command, *planes]
                process = subprocess.Popen(whole, env=environment, stdout=output, stderr=output)
            started.append(process)
            stack.callback(stop, process)
        wait_until_served(prefix, PORT, log)
        yield Target(f"http://127.0.0.1:{PORT}", prefix, {"gateway": started[0].pid})


def dynamo_frontend(port: int, *flags: str) -> list[str]:
    """Returns the module and flags of a frontend with the KV router."""
    command = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    return [*command, "--router-mode", "kv", "--kv-cache-block-size", "16", *flags]


def dynamo_mocker(model: Path, workers: int, speedup: float) -> list[str]:
    """Returns the module and flags of a process with mock workers."""
    command = ["dynamo.mocker", "--model-path", str(model), "--model-name", MODEL]
    command += ["--endpoint", "dyn://dynamo.backend.generate", "--num-workers", str(workers)]
    command += ["--speedup-ratio", str(speedup), "--block-size", "16", "--num-gpu-blocks-override", "16384"]
    return [*command, "--max-num-seqs", "256", "--enable-prefix-caching"]


def dynamo_environment(state: Path) -> tuple[dict[str, str], Sequence[str]]:
    """Returns the environment and the flags of processes of Dynamo that find each other by files in a folder."""
    (state / "kv").mkdir()
    environment = {
        **os.environ,
        **dict.fromkeys(_LOOPBACK, "127.0.0.1"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(state / "kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
    }
    return environment, _PLANES


def wait_until_served(prefix: Sequence[str], port: int, log: Path) -> None:
    """Waits until a frontend lists the model.

    Raises:
        RuntimeError: with the end of the log, when it does not in time.
    """
    deadline = time.monotonic() + READY_WITHIN_S
    probe = [*prefix, sys.executable, str(HERE / "peer_processes.py"), f"http://127.0.0.1:{port}/v1/models"]
    while subprocess.run(probe, check=False, capture_output=True).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Dynamo does not serve after {READY_WITHIN_S:g} s:\n{log.read_text()[-2000:]}")
        time.sleep(1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, by force when it does not end in time."""
    process.terminate()
    try:
        process.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":  # the probe, which runs inside the namespace
    with urllib.request.urlopen(sys.argv[1], timeout=5) as answer:
        sys.exit(0 if f'"{MODEL}"'.encode() in answer.read() else 1)
