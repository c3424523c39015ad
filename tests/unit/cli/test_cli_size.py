"""`sluice size` multiplies measured costs, and refuses what is no load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sluice.cli.errors import BadFlag
from sluice.cli.sizing.costs import TIERS, WORKER, ModelCosts, TierCosts, read
from sluice.cli.sizing.size import Question, size
from tests.unit.cli.conftest import Sluice

TIER = TierCosts(
    idle_cores=0.1,
    request_s=1e-3,
    prompt_token_s=1e-6,
    output_token_s=1e-5,
    idle_bytes=1e8,
    stream_bytes=1e4,
    error=0.2,
    memory_error=0.05,
)
MODELS = {"m": ModelCosts(dict.fromkeys((*TIERS, WORKER), TIER), 0.15, 100, 4_000, 400)}
LOAD = ("--requests-per-s", "20", "--prompt", "500", "--output", "128")


def test_size_one_replica_uses_idle_and_busy_cores() -> None:
    answer = size(Question(100, 1_000, 100, "m"), MODELS)
    gateway = answer.tiers["gateway"]
    assert gateway.replicas == 1
    assert gateway.cores == pytest.approx(0.1 + 100 * (1e-3 + 1e-3 + 1e-3))
    assert gateway.memory_bytes == pytest.approx(1e8 + 100 * (1 + 100 * 0.02) * 1e4)
    assert (gateway.error, gateway.memory_error, answer.error) == (0.2, 0.05, 0.15)
    assert answer.cores == pytest.approx(len(TIERS) * gateway.cores)


def test_size_replicas_stay_within_the_utilization() -> None:
    answer = size(Question(1_000, 1_000, 100, "m", utilization=0.6), MODELS)
    gateway = answer.tiers["gateway"]
    assert gateway.replicas == 6  # 3 busy cores, and each replica has 0.6 - 0.1 to give
    assert gateway.cores / gateway.replicas <= 0.6 + 1e-9


def test_size_redis_has_one_process_and_says_when_that_is_too_little() -> None:
    answer = size(Question(1_000, 1_000, 100, "m"), MODELS)
    assert answer.tiers["redis"].replicas == 1
    assert any("Redis needs 3.1 cores" in note for note in answer.notes)


def test_size_beyond_what_was_measured_says_so() -> None:
    assert size(Question(1, 100, 100, "m"), MODELS).notes == ()
    notes = " ".join(size(Question(100, 5_000, 500, "m"), MODELS).notes)
    assert "Prompts were measured up to 4,000" in notes
    assert "Answers were measured up to 400" in notes
    assert "at most 100 were measured" in notes


def test_size_workers_follow_their_measured_speed() -> None:
    assert size(Question(10, 100, 100, "m"), MODELS).workers is None
    assert size(Question(10, 100, 100, "m", worker_tokens_per_s=500, utilization=0.5), MODELS).workers == 4
    assert size(Question(0.1, 100, 100, "m", worker_tokens_per_s=5_000), MODELS).workers == 1


@pytest.mark.parametrize(
    ("question", "part"),
    [
        (Question(0, 100, 100, "m"), "--requests-per-s is 0"),
        (Question(-3, 100, 100, "m"), "--requests-per-s is -3"),
        (Question(float("nan"), 100, 100, "m"), "--requests-per-s is nan"),
        (Question(1, float("inf"), 100, "m"), "--prompt is inf"),
        (Question(1, 100, -1, "m"), "--output is -1"),
        (Question(1, 100, 100, "m", ttft_s=0), "--ttft-s is 0"),
        (Question(1, 100, 100, "m", inter_token_ms=-1), "--inter-token-ms is -1"),
        (Question(1, 100, 100, "m", utilization=0), "--utilization is 0"),
        (Question(1, 100, 100, "m", utilization=1.5), "--utilization is 1.5"),
        (Question(1, 100, 100, "m", utilization=0.05), "without requests uses 0.100 cores"),
        (Question(1, 100, 100, "m", worker_tokens_per_s=-1), "--worker-tokens-per-s is -1"),
        (Question(1, 100, 100, "other"), "--model other was not measured; choose from m,"),
        (Question(1e12, 100, 100, "m"), "more than 100,000 replicas"),
    ],
)
def test_size_what_is_no_load_is_refused(question: Question, part: str) -> None:
    with pytest.raises(BadFlag, match=re.escape(part)):
        size(question, MODELS)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "cannot be read"),
        ("", "is not a file of costs"),
        ("[]", "is not a file of costs"),
        ('{"models": {"m": {"tiers": {}}}}', "is not a file of costs"),
        ('{"models": {}}', "has no samples"),
    ],
)
def test_size_file_without_costs_is_one_sentence_and_exit_code_2(
    text: str | None, part: str, tmp_path: Path, sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    assert sluice("size", *LOAD, "--costs", str(path)) == 2
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1


def test_size_negative_cost_is_no_cost(tmp_path: Path) -> None:
    document = MODELS["m"].as_json()
    document["tiers"]["router"]["request_s"] = -1
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"models": {"m": document}}))
    with pytest.raises(BadFlag, match="is not a file of costs"):
        read(path)


def test_size_included_costs_give_a_table_and_json(sluice: Sluice, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice("size", *LOAD, "--worker-tokens-per-s", "2000") == 0
    text = capsys.readouterr().out
    assert all(tier in text for tier in TIERS)
    assert "Workers: 2, at 70% of 2000 tokens/s." in text
    assert sluice("size", *LOAD, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["tiers"]) == set(TIERS)
    assert answer["cores"] == pytest.approx(sum(tier["cores"] for tier in answer["tiers"].values()))
    assert 0 < answer["error"] <= 0.25


@pytest.mark.parametrize("arguments", [("--requests-per-s", "0"), ("--requests-per-s", "x"), ("--model", "other"), ()])
def test_size_bad_flags_are_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], sluice: Sluice, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompt", "500", "--output", "128", "--requests-per-s", "20") if arguments else ()
    assert sluice("size", *flags, *arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
