"""`sluice advise` asks a suite that runs, and finds it idle or with requests that wait."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.servers.suite import Suite
from tests.support.waiting import wait_until


def advice(suite: Suite, *flags: str) -> Any:
    command = [sys.executable, "-m", "sluice.cli.main", "advise", "--gateway", suite.url, "--seconds", "1", "--json"]
    ran = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    (tier,) = json.loads(ran.stdout)
    return tier


def test_advise_idle_suite_keeps_the_fewest_workers(suite: Suite) -> None:
    tier = advice(suite)
    assert (tier["model"], tier["role"], tier["workers"]) == ("tekken", "aggregated", 2)
    assert tier["advised"] == 1
    assert tier["load"]["max_sequences"] > 0
    assert tier["load"]["total_blocks"] > 0
    assert advice(suite, "--min-workers", "2")["advised"] == 2


def test_advise_requests_in_progress_are_the_load() -> None:
    def generate(_: int) -> int:
        body = {"model": "tekken", "prompt": "Say something.", "max_tokens": 2_000, "ignore_eos": True}
        return httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).status_code

    settings = {"SLUICE_WORKER_MAX_SEQUENCES": "4", "SLUICE_WORKER_ENGINE_ARGS": "timing=fixed,fixed_step_ms=10"}
    with Suite("--speedup", "1", env=settings) as running, ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(generate, number) for number in range(12)]
        wait_until(lambda: advice(running)["load"]["requests"] == 12)
        tier = advice(running)
        assert (tier["workers"], tier["decisive"], tier["advised"]) == (2, "requests", 4)  # 12 of 0.8 * 4 a worker
        assert [answer.result() for answer in answers] == [200] * 12
