"""A suite without workers of its own, joined by a worker whose engine is a file in the working directory."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import httpx

from sluice.cli import tiny_model
from tests.support.servers.suite import SLUICE, Suite

READY_S = 60

ENGINE = '''
from sluice.engine import Delta, EngineConfig, FinishReason, LLMEngine, Load, Usage
from sluice.engine import detect_processor, fingerprint, resolve


class Echo(LLMEngine):
    """Returns the prompt."""

    def __init__(self, settings):
        super().__init__()
        self.spec = settings.spec

    @classmethod
    def from_args(cls, settings):
        return cls(settings)

    async def start(self, worker_id):
        path = resolve(self.spec.source)
        files = {"source": self.spec.source, "processor": detect_processor(path), "fingerprint": fingerprint(path)}
        return EngineConfig(model=self.spec.name, **files)

    async def generate(self, request, context):
        tokens = request.token_ids[: request.stop.max_tokens]
        yield Delta(token_ids=tokens, cached_tokens=0)
        yield Delta(finish_reason=FinishReason.LENGTH, usage=Usage(len(request.token_ids), len(tokens)))

    def load(self):
        return [Load()]

    async def cleanup(self):
        await self.tasks.close()
'''


def test_worker_with_an_engine_of_the_working_directory_joins_a_suite_without_workers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model.run(model)
    (tmp_path / "echo_engine.py").write_text(ENGINE)
    flags = ("--workers", "0", "--model", str(model), "--model-name", "m", "--migration-enabled", "false")
    with Suite(*flags) as suite, httpx.Client(base_url=suite.url, timeout=60) as client:
        assert client.get("/ready").status_code == 503
        assert client.get("/ready?workers=0").status_code == 200
        assert client.get("/ready?workers=some").status_code == 400
        worker = subprocess.Popen(
            [
                *(str(SLUICE), "worker", "--engine", "echo_engine:Echo", "--model", f"m={model}"),
                *("--listen", "127.0.0.1:0", "--routers", suite.address("router")),
            ],
            cwd=tmp_path,
            env={**os.environ},
        )
        try:
            deadline = time.monotonic() + READY_S
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert client.get("/ready?workers=2").status_code == 503
            body = {"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 3}
            answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == [5, 6, 7]
        finally:
            worker.terminate()
            worker.wait(30)
