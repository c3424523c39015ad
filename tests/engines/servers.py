"""The engines' own servers as far as they go without a GPU: what they say a prompt's ids are, is what they are."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx

from services.common.net.ports import free_port
from services.preprocess.engines.stand_in import engine_folder, is_mistral

ROOT = Path(__file__).resolve().parents[2]
START_S = 180


class Reference(Protocol):
    """Answers with the engine's own ids."""

    def ids(self, chat: dict[str, Any]) -> list[int] | None:
        """Of an OpenAI chat; None when the engine refuses it."""
        ...


def python(engine: str) -> str:
    """The interpreter that has an engine: SLUICE_TEST_VLLM_PYTHON and the like, or what `make test-engines` made."""
    found = os.environ.get(f"SLUICE_TEST_{engine.upper()}_PYTHON") or ROOT / ".venv-engines" / engine / "bin" / "python"
    assert Path(found).exists(), f"{found} is missing; `make test-engines` makes it"
    return str(found)


class _Vllm:
    """vLLM's server that renders and does not generate."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def ids(self, chat: dict[str, Any]) -> list[int] | None:
        answer = self._client.post("/v1/chat/completions/render", json={"model": "m", **chat})
        if answer.status_code == 400:
            return None
        answer.raise_for_status()
        return list(answer.json()["token_ids"])


@contextmanager
def vllm_server(path: Path) -> Iterator[Reference]:
    """vLLM's render server for a tokenizer."""
    folder = engine_folder(path)
    port = free_port()
    parser = "mistral" if is_mistral(folder) else "hermes"
    tools: tuple[str, ...] = ("--enable-auto-tool-choice", "--tool-call-parser", parser)
    if path.name.endswith(".v1"):
        tools = ()  # a model of before there were tools
    command = [
        *(str(Path(python("vllm")).with_name("vllm")), "launch", "render", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"),
        *(*tools, "--trust-request-chat-template"),
        *(("--tokenizer-mode", "mistral") if is_mistral(folder) else ()),
    ]
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with healthy_server(command, environment, folder, port) as url:
        yield _Vllm(url)


@contextmanager
def healthy_server(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, port: int, start_s: float = START_S
) -> Iterator[str]:
    """vLLM's server that a command starts, from when its health check passes; returns its URL."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + start_s
            while not _is_up(url):
                assert process.poll() is None, "vLLM's server has ended"
                assert time.monotonic() < deadline, "vLLM's server does not start"
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class _Sglang:
    """SGLang's tokenizer manager and handler of chats, in a process that has sglang."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ids(self, chat: dict[str, Any]) -> list[int] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"model": "m", **chat}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "SGLang's process has ended"
        found: list[int] | None = json.loads(answer)
        return found


@contextmanager
def sglang_server(path: Path) -> Iterator[Reference]:
    """SGLang's handler for a tokenizer."""
    script = ROOT / "tests" / "engines" / "reference_sglang.py"
    command = [python("sglang"), "-P", str(script), str(ROOT / "services"), str(engine_folder(path))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield _Sglang(process)
        finally:
            process.kill()


SERVERS = {"vllm": vllm_server, "sglang": sglang_server}
