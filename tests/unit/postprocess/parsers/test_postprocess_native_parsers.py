"""The engines' own parsers as far as they go without the engines: names, settings, ids, what `auto` means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.child_rpc.child import ChildLimits
from services.common.discovery.discovered_models import DiscoveredModel
from services.common.packages.model_files import DEFAULT_SOURCE, ModelSpec
from services.postprocess.detokenize.stream import Limits, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.detect import native_names
from services.postprocess.parsers.engine_names import ENGINES, bare, engine_of
from services.postprocess.parsers.engines.adapter import EngineParser, Facts
from services.postprocess.parsers.events import CallArguments, CallStart, Event
from services.postprocess.parsers.isolated.engine_host import EngineHost
from services.postprocess.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ParserRegistry
from services.postprocess.parsers.remote import ParserPair
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry, chosen, load
from tests.support.data.vocabularies import tekken
from tests.support.oracles.errors import raises_error
from tests.support.oracles.parsing import TOOLS

BOTH = ParserRegistry(engines=ENGINES)


class Echo(EngineParser):
    """Says nothing."""

    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        return []


def test_there_are_as_many_names_as_the_packages_ship() -> None:
    assert {engine: (len(names.tool), len(names.reasoning)) for engine, names in ENGINES.items()} == {
        "vllm": (58, 42),
        "sglang": (44, 36),
    }


def test_prefix_selects_the_engine_of_a_parser() -> None:
    assert [engine_of(name) for name in ("vllm:hermes", "sglang:qwen25", "hermes", "mine:Class", "vllm")] == [
        "vllm",
        "sglang",
        "",
        "",
        "",
    ]
    assert (bare("vllm:hermes"), bare("mine:Class"), bare("")) == ("hermes", "mine:Class", "")
    BOTH.check(ParserNames("vllm:hermes", "vllm:qwen3"))
    BOTH.check(ParserNames("sglang:minimax-m2"))
    BOTH.check(ParserNames("vllm:granite-20b-fc", "auto"))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (ParserNames("vllm:hermess"), "vllm 0.33.0 does not have it; similar names: vllm:hermes"),
        (ParserNames("sglang:deepseek_v3"), "similar names: sglang:deepseekv3"),
        (ParserNames("", "vllm:qwen2"), "similar names: vllm:qwen3"),
        (ParserNames("hermess"), "similar names: hermes"),
        (ParserNames("vllm:hermes", "think"), "cannot be combined"),
        (ParserNames("vllm:hermes", "sglang:qwen3"), "cannot be combined"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(names: ParserNames, sentence: str) -> None:
    with raises_error(match=re.escape(sentence), kind=ErrorKind.INVALID_ARGUMENT):
        BOTH.check(names)


def test_an_engine_that_does_not_run_here_is_named_with_its_flag() -> None:
    with pytest.raises(SluiceError, match="--native-parsers vllm"):
        ParserRegistry().check(ParserNames("vllm:hermes"))


def test_the_settings_know_which_engines_they_need() -> None:
    flags = ["--tool-parsers", "a=vllm:hermes", "--reasoning-parsers", "a=vllm:qwen3", "--vllm-python", "/opt/python"]
    assert PostprocessSettings.load(flags).engines == {"vllm": "/opt/python"}
    assert PostprocessSettings.load(["--native-parsers", "sglang,vllm"]).engines == {"sglang": "", "vllm": ""}
    assert PostprocessSettings.load([]).engines == {}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tool-parsers", "a=vllm:hermess"], "similar names: vllm:hermes"),
        (["--tool-parsers", "a=vllm:hermes", "--reasoning-parsers", "a=think"], "cannot be combined"),
        (["--native-parsers", "tgi"], "not an engine with parsers"),
    ],
)
def test_wrong_names_end_the_start_with_2(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        PostprocessSettings.load(flags)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_auto_names_parsers_that_the_engine_has(engine: str) -> None:
    for template in ("", "<arg_key>", "<|tool_calls_section_begin|>", "<minimax:tool_call>", "```json"):
        for tool in ("", *TOOL_PARSERS):
            for reasoning in ("", *REASONING_PARSERS):
                BOTH.check(native_names(engine, ParserNames(tool, reasoning), template))
    assert native_names(engine, ParserNames("hermes", "think"), "").tool == f"{engine}:hermes"


def test_the_operator_decides_about_both_parsers_and_else_the_first_engine() -> None:
    vocabulary = tekken().vocabulary
    found, vocabulary.parsers = vocabulary.parsers, ParserNames("hermes", "think")
    try:
        none = ParserNames()
        assert chosen(none, vocabulary, ()) == ParserNames("hermes", "think")
        assert chosen(none, vocabulary, ("vllm",)) == ParserNames("vllm:hermes", "vllm:qwen3")
        assert chosen(ParserNames("hermes"), vocabulary, ("vllm",)) == ParserNames("hermes", "think")
        assert chosen(ParserNames("sglang:qwen25"), vocabulary, ("vllm",)).reasoning == "sglang:qwen3"
    finally:
        vocabulary.parsers = found


def test_ids_have_the_engines_form_and_are_the_same_again() -> None:
    for given, form in (
        ("chatcmpl-tool-" + "0af1" * 8, r"chatcmpl-tool-[0-9a-f]{32}"),
        ("call_" + "0af1" * 6, r"call_[0-9a-f]{24}"),
        ("Ab3dE6gH9", r"[0-9A-Za-z]{9}"),
        ("functions.f:0", r"functions\.f:0"),
        ("", r"call_[0-9A-Za-z]{24}"),
    ):
        reported = [Echo(ParserContext(TOOLS, identity=identity)).call(0, given, "f", "{}") for identity in "aab"]
        starts = [events[0] for events in reported if isinstance(events[0], CallStart)]
        assert all(re.fullmatch(form, start.id) for start in starts), given
        assert starts[0] == starts[1]
        assert (starts[0] == starts[2]) == ("functions" in given)
    written = Echo(ParserContext(TOOLS, identity="a"))
    written.feed_token("[CALL_ID]Ab3dE6gH9", 7)
    assert written.call(0, "Ab3dE6gH9", "f", "")[0] == CallStart(0, "Ab3dE6gH9", "f")
    assert written.call(0, "Ab3dE6gH9", "f", "{") == [CallArguments(0, "{")], "a name begins a call once"


async def test_unusable_pair_raises_an_error_that_names_it() -> None:
    host = EngineHost("vllm", "", ChildLimits(1.0, 64))
    usable, not_usable = ParserPair("/m", "hermes", ""), ParserPair("/m", "openai", "")
    assert host.facts(usable) is None
    host._set_facts(usable, {"keeps_special": True, "keeps_special_always": False})
    host._set_facts(not_usable, {"error": "the tokenizer lacks a token."})
    assert host.facts(usable) == Facts(True, False)
    assert await host.prepare(usable) == Facts(True, False)
    with raises_error(match="the tokenizer lacks a token", kind=ErrorKind.FAILED_PRECONDITION):
        await host.prepare(not_usable)
    with pytest.raises(SluiceError, match="similar names: hermes"):
        await host.prepare(ParserPair("/m", "hermez", ""))
    await host.close()


@pytest.mark.parametrize("asked", [False, True])
async def test_what_is_only_preferred_gives_way_where_it_cannot_work(asked: bool) -> None:
    stream_factory, loaded = (
        StreamFactory(Limits(), CustomParsers(engines={"vllm": ""})),
        load(ModelSpec("m", DEFAULT_SOURCE)),
    )
    given = ParserNames("vllm:mistral") if asked else ParserNames()
    library = VocabularyRegistry([ModelSpec("m", "x")], 30, lambda spec: loaded, {"m": given}, lambda spec: ["vllm"])
    vocabulary = await library.get("m")
    host = stream_factory.host("vllm:mistral")
    assert isinstance(host, EngineHost)
    host._set_facts(ParserPair(vocabulary.source, "mistral", ""), {"error": "the tokenizer lacks a token."})
    if asked:
        with pytest.raises(SluiceError, match="lacks a token"):
            await stream_factory.prepare_for(vocabulary)
    else:
        await stream_factory.prepare_for(vocabulary)
        assert vocabulary.parsers == ParserNames("mistral")
    await stream_factory.close()


async def test_an_interpreter_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    stream_factory = StreamFactory(Limits(), CustomParsers(engines={"vllm": str(script)}))
    with pytest.raises(SluiceError, match="do not start"):
        await stream_factory.start()
    await stream_factory.close()


async def test_template_arguments_must_be_an_object() -> None:
    stream_factory, vocabulary = StreamFactory(Limits()), tekken().vocabulary
    for text in (b"[]", b"{"):
        with raises_error(param="chat_template_kwargs"):
            stream_factory.plan(StreamOptions("m", tool_parser="hermes", template_kwargs_json=text), vocabulary, "r")


def preferred(*flags: str, engine: str = "") -> Sequence[str]:
    """The engines whose parsers `auto` prefers, for a configured model or one learned from a worker of this engine."""
    settings = PostprocessSettings.load(list(flags))
    spec = ModelSpec("new", "/delivered", "hf")
    return settings.native_of(
        settings.learned_spec(DiscoveredModel(spec, engine, "0" * 64)) if engine else settings.configured[0]
    )


def test_processing_flag_makes_auto_mean_the_engines_parsers() -> None:
    routers = ("--routers", "localhost:1")
    assert preferred() == []
    assert preferred("--vllm-processing") == ["vllm"]
    assert preferred("--sglang-processing", *routers, engine="mock") == ["sglang"]
    assert preferred("--native-framework-processing", *routers, engine="sglang") == ["sglang"]
    assert preferred("--native-framework-processing", *routers, engine="mock") == []
    assert preferred("--models", "a=/x@vllm", "--native-parsers", "sglang") == ["sglang"]
    assert preferred("--models", "a=/x@vllm", "--sglang-processing") == ["vllm"]


def test_processing_flag_starts_the_engines_parsers() -> None:
    routers = ("--routers", "localhost:1")
    settings = PostprocessSettings.load(["--vllm-processing", "--vllm-python", "/opt/python"])
    assert (settings.engines, settings.later_engines) == ({"vllm": "/opt/python"}, {})
    settings = PostprocessSettings.load(["--native-framework-processing", *routers])
    assert (settings.engines, settings.later_engines) == ({}, {"sglang": "", "vllm": ""})
    settings = PostprocessSettings.load(["--native-framework-processing", "--models", "a=/x@vllm", *routers])
    assert (settings.engines, settings.later_engines) == ({"vllm": ""}, {"sglang": ""})


def test_family_without_a_native_parser_keeps_the_built_in_pair() -> None:
    vocabulary = tekken().vocabulary
    found, vocabulary.parsers = vocabulary.parsers, ParserNames("granite", "think")
    try:
        assert chosen(ParserNames(), vocabulary, ["sglang"]) == ParserNames("granite", "think")
        assert chosen(ParserNames(), vocabulary, ["sglang", "vllm"]) == ParserNames("vllm:granite", "vllm:qwen3")
    finally:
        vocabulary.parsers = found


async def test_missing_package_of_a_later_engine_replaces_its_parsers_unless_they_are_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    loaded = load(ModelSpec("m", DEFAULT_SOURCE))
    loaded.parsers = ParserNames("vllm:mistral")
    stream_factory = StreamFactory(Limits(), CustomParsers(later={"vllm": ""}))
    await stream_factory.start()
    try:
        with raises_error(match=r"install sluice-llm\[vllm\]", code="missing_extra"):
            await stream_factory.prepare_for(loaded)
        loaded.built_in = ParserNames("mistral")
        await stream_factory.prepare_for(loaded)
    finally:
        await stream_factory.close()
    assert (loaded.parsers, loaded.replaces_engine) == (ParserNames("mistral"), True)
