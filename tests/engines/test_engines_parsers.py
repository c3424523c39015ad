"""The engines' own parsers through this service: the same as calling those packages directly, for every name."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.common.base.errors import SluiceError
from services.common.child_rpc.child import ChildLimits
from services.common.packages.model_files import DEFAULT_SOURCE, ModelSpec
from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.detokenize.vocabulary import Vocabulary
from services.postprocess.parsers.engine_names import ENGINES
from services.postprocess.parsers.isolated.engine_host import EngineHost
from services.postprocess.parsers.remote import RemoteStream
from services.postprocess.streams.factory import MAX_PARSER_MEMORY_MB, CustomParsers, StreamFactory
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry, load
from tests.engines.servers import ROOT, python
from tests.support.data.marked_vocabulary import build_marked_model, markers_in
from tests.support.data.parser_corpus import TOOLS, corpus
from tests.support.oracles.parsing import ParsedDelta, said
from tests.support.waiting import until

pytestmark = pytest.mark.engines

CASES = int(os.environ.get("SLUICE_TEST_ENGINE_PARSER_CASES", "60"))
"""Outputs of the corpus that every parser is given."""

WAIT_S = 120
FOLDERS = {"vllm": ("tool_parsers", "reasoning", "parser"), "sglang": ("srt/function_call", "srt/parser")}


class Both:
    """An engine behind the service, and the same engine called directly."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine = engine
        self.package = Path(python(engine)).parents[1] / "lib" / "python3.11" / "site-packages" / engine
        self.markers = markers_in(self.package / name for name in FOLDERS[engine])
        self.folder = build_marked_model(folder, self.markers)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        eos = self.tokenizer.token_to_id("<eos>")
        assert eos is not None
        self.eos = eos
        self.vocabulary: Vocabulary = load(ModelSpec("m", str(folder)))
        script = ROOT / "tests" / "engines" / f"reference_parsers_{engine}.py"
        arguments = [str(folder)] if engine == "vllm" else [str(ROOT / "services"), str(folder)]
        self.process = subprocess.Popen(
            [python(engine), "-P", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.opener = StreamFactory(
            Limits(), CustomParsers(limits=ChildLimits(20, MAX_PARSER_MEMORY_MB), engines={engine: python(engine)})
        )

    def options(self, tool: str, reasoning: str, tools: bool) -> StreamOptions:
        return StreamOptions(
            "m",
            tool_parser=f"{self.engine}:{tool}" if tool else "",
            reasoning_parser=f"{self.engine}:{reasoning}" if reasoning else "",
            tools_json=json.dumps(TOOLS).encode() if tools else b"",
            eos_token_ids=frozenset([self.eos]),
        )

    def direct(self, tool: str, reasoning: str, tools: bool, ids: list[int]) -> dict[str, Any]:
        case = {"tool": tool, "reasoning": reasoning, "tools": TOOLS if tools else [], "ids": ids, "eos": self.eos}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the reference has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ours(self, options: StreamOptions, ids: list[int]) -> tuple[ParsedDelta, int]:
        async with asyncio.timeout(WAIT_S):
            events, finish = await self.opener.parse(
                [*ids, self.eos], options, self.vocabulary, FinishReason.STOP, "request"
            )
        return said(events), finish.reasoning_tokens


@pytest.fixture(params=["vllm", "sglang"])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Both]:
    with tempfile.TemporaryDirectory() as folder:
        made = Both(request.param, Path(folder))
        try:
            await made.opener.start()
            yield made
        finally:
            await made.opener.close()
            made.process.kill()
            made.process.wait()


def cases(engine: str) -> Iterator[tuple[str, str, bool]]:
    """Every name of either kind; the tool parsers with tools, the reasoning parsers with and without."""
    for name in sorted(ENGINES[engine].tool):
        yield name, "", True
    for name in sorted(ENGINES[engine].reasoning):
        yield "", name, False
        yield (name if name in ENGINES[engine].tool else ""), name, True


async def test_every_parser_returns_the_output_of_its_package(both: Both) -> None:
    texts = corpus(7, both.markers, CASES)
    wrong: list[tuple[Any, ...]] = []
    compared, unusable = 0, set()
    for tool, reasoning, tools in cases(both.engine):
        options = both.options(tool, reasoning, tools)
        for text in texts:
            ids = both.tokenizer.encode(text, add_special_tokens=False).ids
            expected = both.direct(tool, reasoning, tools, ids)
            try:
                heard, reasoning_tokens = await both.ours(options, ids)
            except SluiceError as error:
                unusable.add((tool, reasoning, error.message))
                break
            compared += 1
            if "error" in expected:
                if "parser_failed" not in heard.degraded:
                    wrong.append((tool, reasoning, text, expected["error"], heard))
                continue
            calls = [(name, arguments) for name, arguments in expected["calls"].values() if name]
            same = (heard.content, heard.reasoning, [call[:2] for call in heard.calls]) == (
                expected["content"],
                expected["reasoning"],
                calls,
            )
            if not same or reasoning_tokens != expected.get("reasoning_tokens", reasoning_tokens):
                wrong.append((tool, reasoning, text, expected, heard, reasoning_tokens))
    assert wrong == [], f"{len(wrong)} of {compared}"
    assert unusable == set(), "the corpus' model has what every parser asks for"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_parser_names_equal_those_of_the_package(engine: str) -> None:
    script = {
        "vllm": "from vllm.tool_parsers import ToolParserManager as T; from vllm.reasoning import "
        "ReasoningParserManager as R; print(*T.list_registered()); print(*R.list_registered())",
        "sglang": "import sglang, runpy, os; d = os.path.dirname(sglang.__file__) + '/srt/'; "
        "print(*runpy.run_path(d + 'function_call/parser_names.py')['TOOL_CALL_PARSER_NAMES']); "
        "print(*runpy.run_path(d + 'parser/reasoning_parser_names.py')['REASONING_PARSER_NAMES'])",
    }[engine]
    said_ = subprocess.run([python(engine), "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    tool, reasoning = said_.stdout.strip().split("\n")[-2:]
    shipped = ENGINES[engine]
    assert frozenset(tool.split()) == shipped.tool
    assert frozenset(reasoning.split()) == shipped.reasoning
    assert {"vllm": (58, 42), "sglang": (44, 36)}[engine] == (len(shipped.tool), len(shipped.reasoning))


async def test_killed_replica_fails_no_request(both: Both) -> None:
    name = {"vllm": "hermes", "sglang": "qwen25"}[both.engine]
    options = both.options(name, "", True)
    ids = both.tokenizer.encode(corpus(1, [], 8)[5], add_special_tokens=False).ids
    expected, _ = await both.ours(options, ids)
    host = both.opener.host(options.tool_parser)
    assert isinstance(host, EngineHost)
    first = host.pid
    streams = []
    for number in range(8):
        plan = both.opener.plan(options, both.vocabulary, "request")
        stream = both.opener.begin(options, both.vocabulary, plan)
        assert isinstance(stream, RemoteStream)
        stream.feed(ids[: number * 3 + 1])
        streams.append((stream, number * 3 + 1))
    for kill in range(3):
        await until(lambda: host.pid, WAIT_S)  # 0 while there is none
        os.kill(host.pid, 9)
        for stream, at in streams:
            stream.feed(ids[at + kill * 5 : at + kill * 5 + 5])
        await asyncio.sleep(0.2)
    for stream, at in streams:
        stream.feed(ids[at + 15 :])
        stream.end(FinishReason.STOP)
    await until(lambda: all(stream.finish is not None for stream, _ in streams), WAIT_S)
    assert host.pid != first
    for stream, _ in streams:
        assert said(stream.events) == expected, "ids of calls included"


async def test_parser_that_loops_or_raises_is_lost_for_its_stream_only(both: Both) -> None:
    name = {"vllm": "hermes", "sglang": "qwen25"}[both.engine]
    options = both.options(name, "", True)
    ids = both.tokenizer.encode("some text", add_special_tokens=False).ids
    await both.opener.prepare(both.opener.plan(options, both.vocabulary, "r"))
    good = both.opener.begin(options, both.vocabulary, both.opener.plan(options, both.vocabulary, "good"))
    bad = both.opener.begin(options, both.vocabulary, both.opener.plan(options, both.vocabulary, "bad"))
    assert isinstance(good, RemoteStream)
    assert isinstance(bad, RemoteStream)
    object.__setattr__(bad.context, "source", "/nowhere")  # the engine raises when it opens this one
    for stream in (bad, good):
        stream.feed(ids)
        stream.end(FinishReason.STOP)
    await until(lambda: good.finish is not None and bad.finish is not None, WAIT_S)
    assert (said(good.events).content, said(good.events).degraded) == ("some text", frozenset())
    assert (said(bad.events).content, said(bad.events).degraded) == ("some text", frozenset(["parser_failed"]))


async def test_mistral_files_are_used_or_replaced(both: Both) -> None:
    """vLLM reads Tekken's file; SGLang does not, and a parser that was only preferred gives way to the built-in one."""
    library = VocabularyRegistry([ModelSpec("tekken", DEFAULT_SOURCE)], WAIT_S, native=lambda spec: (both.engine,))
    vocabulary = await library.get("tekken")
    await both.opener.prepare_for(vocabulary)
    assert vocabulary.parsers.tool == {"vllm": "vllm:mistral", "sglang": "mistral"}[both.engine]


async def test_incompatible_options_are_rejected_with_a_message(both: Both) -> None:
    with pytest.raises(SluiceError, match="similar names"):
        both.opener.plan(both.options("hermess", "", True), both.vocabulary, "r")
    options = StreamOptions("m", tool_parser=f"{both.engine}:hermes", reasoning_parser="think")
    with pytest.raises(SluiceError, match="cannot be combined"):
        both.opener.plan(options, both.vocabulary, "r")


async def test_an_interpreter_without_the_engine_is_named() -> None:
    opener = StreamFactory(Limits(), CustomParsers(engines={"vllm": sys.executable}))
    with pytest.raises(SluiceError, match=r"install sluice-llm\[vllm\].*--vllm-python"):
        await opener.start()
    await opener.close()
