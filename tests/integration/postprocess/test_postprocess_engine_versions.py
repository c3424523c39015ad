"""Engines' packages of other versions: what works, and what is said where something does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.child_rpc.fork_server import ForkServer
from services.common.packages.engines import WORKING_VERSIONS
from services.common.packages.model_files import DEFAULT_SOURCE, ModelSpec
from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from services.postprocess.streams.vocabulary_registry import load
from tests.support.data.vocabularies import tekken
from tests.support.oracles.errors import raises_error
from tests.support.oracles.parsing import TOOLS, said

PACKAGE = Path(__file__).parents[2] / "support" / "fake_vllm_package"
NAMED = StreamOptions("m", tool_parser="vllm:hermes", tools_json=json.dumps(TOOLS).encode())
AUTO = replace(NAMED, tool_parser="auto")
OLD = "0.30.0"
SENTENCE = "need vllm.parser, which vllm 0.30.0 does not have; install vllm 0.33.0 or 0.32.0, or set --vllm-python"


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives an entry for each start of an engine's process."""
    counted: list[int] = []
    popen = ForkServer._popen

    def counting(self: ForkServer, control: int) -> Any:
        counted.append(control)
        return popen(self, control)

    monkeypatch.setattr(ForkServer, "_popen", counting)
    return counted


def _of(version: str) -> dict[str, str]:
    return {"PYTHONPATH": str(PACKAGE), "FAKE_VLLM_VERSION": version}


def _model() -> Vocabulary:
    vocabulary = load(ModelSpec("m", DEFAULT_SOURCE))
    vocabulary.parsers, vocabulary.built_in = ParserNames("vllm:hermes"), ParserNames("mistral")
    return vocabulary


@pytest.mark.parametrize("version", WORKING_VERSIONS["vllm"])
@pytest.mark.parametrize("single", [False, True])
async def test_parsers_of_a_working_version_parse(monkeypatch: pytest.MonkeyPatch, version: str, single: bool) -> None:
    for name, value in _of(version).items():
        monkeypatch.setenv(name, value)
    stream_factory = StreamFactory(Limits(), CustomParsers(engines={"vllm": ""}))
    await stream_factory.start()
    try:
        options = replace(NAMED, single_tool_call=single)
        tokens = tekken().encode("twice CALL now")
        events, finish = await stream_factory.parse(tokens, options, _model(), FinishReason.STOP, "r")
    finally:
        await stream_factory.close()
    assert finish.error is None
    parsed = said(events)
    assert (parsed.content, parsed.degraded) == ("TWICE CALL NOW", frozenset())
    assert [call[0] for call in parsed.calls] == (["f0"] if single else ["f0", "f1"])


async def test_parsers_of_an_old_version_are_replaced_and_their_process_is_started_once(
    monkeypatch: pytest.MonkeyPatch, starts: list[int]
) -> None:
    for name, value in _of(OLD).items():
        monkeypatch.setenv(name, value)
    stream_factory = StreamFactory(Limits(), CustomParsers(later={"vllm": ""}))
    await stream_factory.start()
    try:
        for _ in range(3):
            vocabulary = _model()
            await stream_factory.prepare_for(vocabulary)
            assert vocabulary.parsers == vocabulary.built_in
            events, finish = await stream_factory.parse(
                tekken().encode("plain"), AUTO, vocabulary, FinishReason.STOP, "r"
            )
            assert finish.error is None
            assert (said(events).content, said(events).degraded) == ("plain", frozenset({"engine_parser_replaced"}))
            with raises_error(match=SENTENCE, code="engine_version", kind=ErrorKind.FAILED_PRECONDITION):
                await stream_factory.prepare(stream_factory.plan(NAMED, vocabulary, "r"))
    finally:
        await stream_factory.close()
    assert len(starts) == 1


@pytest.mark.parametrize("service", ["postprocess", "preprocess"])
def test_service_with_an_old_version_is_refused_at_start_with_both_versions(service: str) -> None:
    command = [sys.executable, "-m", f"services.{service}", "--listen", "127.0.0.1:0", "--vllm-processing"]
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [*command, "--models", f"m={DEFAULT_SOURCE}"],
        env={**os.environ, **_of(OLD), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    lacking = "vllm.parser" if service == "postprocess" else "vllm.renderers.params.TokenizeParams"
    assert SENTENCE.replace("vllm.parser", lacking) in ended.stderr
    assert "Traceback" not in ended.stderr
