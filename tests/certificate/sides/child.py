"""A side in a child process of the interpreter that has an engine: batches over JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.certificate.sides.side import Case, Result

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = ROOT / ".venv-engines"


def python_of(engine: str) -> Path:
    """The interpreter that `scripts/engines.sh` made for an engine."""
    return PYTHONS / engine / "bin" / "python"


class ChildSide:
    """Runs `inside_NAME` in the engine's interpreter.

    Args:
        name: of the engine and of the module.
        log: the child's output.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        readable, writable = os.pipe()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python_of(name)), "-m", "tests.certificate.sides.inside", name, str(writable)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[writable],
                text=True,
            )
        os.close(writable)
        self._replies = os.fdopen(readable)
        self._log = log
        facts = self._read()
        self.version: str = facts["version"]
        self.apis: frozenset[str] = frozenset(facts["apis"])

    def _read(self) -> Any:
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended; see {self._log}")
        return json.loads(line)

    def send(self, cases: Sequence[Case]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cases) + "\n")
        self._process.stdin.flush()

    def receive(self) -> list[Result]:
        results: list[Result] = self._read()
        return results

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._replies.close()
