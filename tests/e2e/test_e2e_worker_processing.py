"""Parity from a real comparison: the worker says itself what prompts it makes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.data.tiny_models import CHATML, build_tiny_model
from tests.support.servers.suite import Suite

DEADLINE_S = 60


def parity_of(suite: Suite, model: str) -> dict[str, Any]:
    """The model's entry, as soon as both sides are known."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        [entry] = [entry for entry in httpx.get(f"{suite.url}/v1/models").json()["data"] if entry["id"] == model]
        found: dict[str, Any] = entry["tokenizer"]
        if found["parity"] != "unknown" and found["worker_prompt_fingerprints"]:
            return found
        time.sleep(0.2)
    raise AssertionError(f"parity of {model} stays unknown")


def test_a_worker_that_makes_the_same_prompts_is_proven_to(suite: Suite) -> None:
    said = parity_of(suite, "tekken")
    assert said["parity"] == "same_prompts"
    assert said["worker_prompt_fingerprints"] == [said["prompt_fingerprint"]]


def test_a_worker_with_another_template_differs_though_its_files_are_the_same(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "tiny")
    template = tmp_path / "changed.jinja"
    template.write_text(CHATML.replace("assistant\\n", "assistant: "), "utf-8")
    with Suite("--model", str(folder), "--workers", "1", env={"SLUICE_WORKER_CHAT_TEMPLATE": str(template)}) as suite:
        said = parity_of(suite, "tiny")
    assert said["parity"] == "differs"
    assert said["worker_fingerprints"] == [said["fingerprint"]]
    assert said["worker_prompt_fingerprints"] != [said["prompt_fingerprint"]]
