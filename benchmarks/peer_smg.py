"""Installs SGLang's model gateway (SMG) from packages and starts it with mock workers on this machine's loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from peer_processes import MODEL, READY_WITHIN_S, Target, environment, stop

from services.common.net.ports import free_port

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"


def install_smg(folder: Path) -> Path:
    """Installs the gateway into a folder, unless that was done; returns its Python."""
    return environment(folder / "smg", HERE / "peers_smg.txt")


@contextmanager
def smg(python: Path, model: Path, workers: int, speedup: float, *, single: bool = False) -> Iterator[Target]:
    """Runs the gateway with cache-aware routing, and mock workers that it reaches by gRPC.

    In this mode the gateway applies the chat template, tokenizes, detokenizes and writes the events; with HTTP workers
    it would only forward.

    Args:
        single: the workers send a message for each token.

    Raises:
        RuntimeError: with the end of its log, when it does not serve in time.
    """
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        output = stack.enter_context(log.open("ab"))
        addresses = []
        for _ in range(workers):
            process, address = _worker(model, speedup, single, output.fileno())
            stack.callback(stop, process)
            _wait_until_ready(process, log)
            addresses.append(address)
        url, command = _gateway(python, model, addresses)
        gateway = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=output, stderr=output)
        stack.callback(stop, gateway)
        _wait_until_served(url, workers, gateway, log)
        yield Target(url, (), {"gateway": gateway.pid})


def _worker(model: Path, speedup: float, single: bool, output: int) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    command = [sys.executable, str(HERE / "smg_worker.py"), "--port", str(port)]
    command += ["--model", str(model), "--model-name", MODEL, "--speedup", str(speedup)]
    command += ["--single"] if single else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output), f"grpc://{HOST}:{port}"


def _gateway(python: Path, model: Path, workers: Sequence[str]) -> tuple[str, list[str]]:
    port, metrics_port = free_port(), free_port()
    command = [str(python), "-m", "smg.launch_router", "--host", HOST, "--port", str(port)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    command += ["--policy", "cache_aware", "--block-size", "16", "--model-path", str(model), "--worker-urls", *workers]
    return f"http://{HOST}:{port}", command


def _wait_until_ready(worker: subprocess.Popen[bytes], log: Path) -> None:
    assert worker.stdout is not None
    if worker.stdout.readline() != b"ready\n":
        raise RuntimeError(f"a worker of SMG does not start:\n{log.read_text()[-2000:]}")


def _wait_until_served(url: str, workers: int, gateway: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while _registered(url) < workers:
        if gateway.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"SMG does not serve:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def _registered(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=5) as answer:
            return int(json.load(answer)["total"])
    except OSError:
        return 0
