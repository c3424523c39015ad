"""The five engines, each described once for the tests that treat them all alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from tests.engines import engine_suite as suite
from tests.engines.test_engines_vllm import describe as describe_vllm

SIZES = ("--block-size", "16", "--total-blocks", "1024", "--max-batched-tokens", "1024", "--max-sequences", "64")
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
HERE = Path(__file__).parent


def mock(model: Path) -> suite.EngineUnderTest:
    """With a clock that runs about as fast as the others do on a CPU."""
    flags = (*SIZES, "--engine-args", "timing=fixed,fixed_step_ms=4")
    return suite.EngineUnderTest(
        "mock", sys.executable, model, flags, QUIET, offline=("-P", str(HERE / "offline_mock.py"))
    )


def transformers(model: Path) -> suite.EngineUnderTest:
    """In the worker's own process."""
    return suite.EngineUnderTest(
        name="transformers",
        python=suite.interpreter("transformers"),
        model=model,
        flags=SIZES,
        env=QUIET,
        offline=("-P", str(HERE / "offline_transformers.py")),
    )


def sglang(model: Path) -> suite.EngineUnderTest:
    """Its scheduler in a process of its own."""
    return suite.EngineUnderTest(
        name="sglang",
        python=suite.interpreter("sglang"),
        model=model,
        flags=SIZES,
        env=QUIET,
        offline=("-P", str(HERE / "offline_sglang.py")),
    )


def vllm_grpc(model: Path) -> suite.EngineUnderTest:
    """An unmodified server as the worker's child."""
    return replace(describe_vllm(model), name="vllm-grpc")


ENGINES: Mapping[str, Callable[[Path], suite.EngineUnderTest]] = {
    "mock": mock,
    "transformers": transformers,
    "vllm": describe_vllm,
    "vllm-grpc": vllm_grpc,
    "sglang": sglang,
}

FOR_EMBEDDINGS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--", "--runner", "pooling"),
    "vllm-grpc": ("--", "--runner", "pooling"),
    "sglang": ("--engine-args", "is_embedding=true"),
}
"""Flags of a worker that computes embeddings, where the engine does that or tokens and never both."""


def engine_process(worker: suite.RunningWorker) -> psutil.Process:
    """The process that computes: a child of the worker's, or the worker itself."""
    process = psutil.Process(worker.process.pid)
    for child in process.children(recursive=True):
        if "EngineCore" in " ".join(child.cmdline()) or "sglang" in child.name():
            return child
    return process
