"""benchmarks/trace.py, as its README runs it: a trace file, generated agents, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCALES = ("--prefill-load-scale", "1", "--prefill-load-scale", "8")


def trace(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/trace.py"), "--policy", "kv", "--processes", "1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def rows(*flags: str) -> list[dict[str, Any]]:
    ended = trace("--json", "--speedup", "8", *flags)
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout)["rows"]
    return found


@pytest.mark.parametrize("affinity", ["none", "session"])
def test_generated_agents_are_replayed_with_each_weight(affinity: str) -> None:
    found = rows("--agents", "--requests", "60", "--affinity", affinity, *SCALES)
    assert [(row["prefill_load_scale"], row["requests"], row["shed"]) for row in found] == [(1, 60, 0), (8, 60, 0)]
    assert all(row["hit"] > 0.5 for row in found), "agents share their system prompts"


def test_trace_file_is_replayed_and_distinct_prompts_reuse_nothing(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 200 * turn,
            "input_length": 512 * turn + 600,
            "output_length": 5,
            "hash_ids": list(range(turn + 2)),
        }
        for turn in range(20)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (shared,) = rows("--trace", str(file))
    (distinct,) = rows("--trace", str(file), "--distinct")
    assert shared["requests"] == distinct["requests"] == 20
    assert shared["hit"] > 0.5 > distinct["hit"] == 0


def test_neither_trace_nor_agents_is_refused() -> None:
    ended = trace()
    assert ended.returncode == 2
    assert "Give either --trace or --agents." in ended.stderr
