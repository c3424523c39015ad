"""The examples of one's own stages, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.servers.suite import Suite

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
PATH = {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def test_own_stages_and_engine_prompts_in_a_running_suite() -> None:
    stages = ("--stage", "postprocess=own_stages:TokenNumbers", "--stage", "route=own_stages:Sticky")
    with Suite("--workers", "1", "--preprocessing", "engine", *stages, env=PATH) as suite:
        body = {"model": "tekken", "messages": [{"role": "user", "content": "Tell me of rivers."}], "max_tokens": 9}
        answer = httpx.post(f"{suite.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        numbers = answer.json()["choices"][0]["message"]["content"].split(" ")
        usage = answer.json()["usage"]
        assert numbers[0] == f"({usage['prompt_tokens']})"
        assert len(numbers) == 6
        assert usage["completion_tokens"] == 5


def test_a_gateway_refuses_a_class_that_is_no_stage() -> None:
    command = [sys.executable, "-m", "services.gateway", "--listen", "127.0.0.1:0", "--stage", "route=own_stages:Tidy"]
    ended = subprocess.run(
        command, env={**os.environ, **PATH}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "own_stages:Tidy needs a method `async def route`" in ended.stderr
    assert "Traceback" not in ended.stderr
