"""Parsed streams: tokens in any batches, parsers that fail, what the options ask for."""

from __future__ import annotations

import itertools
import json
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import DEFAULT_SOURCE, ModelSpec, resolve
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.metrics import Metrics
from services.postprocess.parsers import detect as hints
from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import Content, Event
from services.postprocess.parsers.families.hermes import HermesParser
from services.postprocess.parsers.registry import ParserRegistry
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.parsed import ParsedStream
from services.postprocess.streams.parser_selection import plan_of
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry, load
from services.postprocess.wire import to_text_batch
from tests.support.data.tiny_models import CHATML, build_tiny_model
from tests.support.data.vocabularies import byte_level, tekken, word_piece
from tests.support.oracles.errors import raises_error
from tests.support.oracles.parsing import TOOLS, ParsedDelta, said

CALL = '{"name": "get_weather", "arguments": {"city": "Zürich 🌧️ 👩‍👩‍👧", "n": [1, 2.50]}}'
ANSWER = f"<think>\nBedenke: 你好 🧑‍🚀\n</think>\n\nHier 😀:\n<tool_call>\n{CALL}\n</tool_call>"
OPTIONS = StreamOptions(
    "m",
    eos_token_ids=frozenset([2]),
    tool_parser="hermes",
    reasoning_parser="think",
    tools_json=json.dumps(TOOLS).encode(),
)
TOOL_CALLS_ID = 9  # of [TOOL_CALLS] in the bundled Tekken


def opened(options: StreamOptions = OPTIONS, known: Any = None) -> ParsedStream:
    stream_factory, vocabulary = StreamFactory(Limits()), (known or tekken()).vocabulary
    stream = stream_factory.parsed(options, vocabulary, stream_factory.plan(options, vocabulary, "r"))
    assert isinstance(stream, ParsedStream)
    return stream


def run(
    tokens: list[int], cuts: list[int], options: StreamOptions = OPTIONS, known: Any = None
) -> tuple[ParsedDelta, Finish]:
    stream = opened(options, known)
    for a, b in itertools.pairwise([0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]):
        stream.feed(tokens[a:b])
    stream.end(FinishReason.STOP)
    assert stream.finish is not None
    return said(stream.events), stream.finish


@settings(deadline=None)
@given(st.data())
def test_any_batches_of_tokens_produce_the_same_events(data: st.DataObject) -> None:
    known = data.draw(st.sampled_from([tekken, byte_level]))()
    text = ANSWER[: data.draw(st.integers(0, len(ANSWER)))] + data.draw(
        st.sampled_from(["", "😀", '"}', "</tool_call>"])
    )
    options = replace(OPTIONS, stop=data.draw(st.sampled_from([(), ("你",), ("</tool_call>",), ('"n"',)])))
    tokens = known.encode(text)
    whole = run(tokens, [], options, known)
    assert run(tokens, data.draw(st.lists(st.integers(0, 300), max_size=10)), options, known) == whole
    assert run(tokens, list(range(len(tokens))), options, known) == whole


def test_an_answer_taken_apart() -> None:
    tokens = tekken().encode(ANSWER)
    heard, finish = run([*tokens, 2], [])
    assert heard.reasoning == "Bedenke: 你好 🧑‍🚀"
    assert heard.content == "Hier 😀:"
    assert [call[:2] for call in heard.calls] == [("get_weather", CALL[CALL.index('{"city') : -1])]
    assert finish.reason is FinishReason.TOOL_CALLS
    assert finish.stop_token_id == 2
    assert finish.tokens_seen == len(tokens) + 1
    inside = len(tekken().encode("<think>\nBedenke: 你好 🧑‍🚀\n"))
    assert abs(finish.reasoning_tokens - inside) <= 4


def test_a_cut_off_answer_stays_cut_off() -> None:
    stream = opened()
    stream.feed(tekken().encode(ANSWER))
    stream.end(FinishReason.LENGTH)
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.LENGTH


def test_a_stop_string_counts_wherever_it_stands_and_ends_the_stream() -> None:
    options = replace(OPTIONS, stop=("Bedenke",))
    stream = opened(options)
    stream.feed(tekken().encode(ANSWER))
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.stop_string) == (FinishReason.STOP, "Bedenke")
    assert said(stream.events) == ParsedDelta("", "", (), frozenset(), ())


def test_special_tokens_that_are_markup_are_seen_and_others_skipped() -> None:
    options = replace(OPTIONS, tool_parser="mistral", reasoning_parser="")
    tokens = [3, *tekken().encode("Hi"), 4, TOOL_CALLS_ID, *tekken().encode('[{"name": "f", "arguments": {}}]'), 2]
    heard, _ = run(tokens, [], options)
    assert (heard.content, [call[:2] for call in heard.calls]) == ("Hi", [("f", "{}")])
    written = [*tekken().encode('[TOOL_CALLS][{"name": "f", "arguments": {}}]'), 2]
    assert run(written, [], options)[0].calls, "a model without the token writes the words"


def test_a_character_of_many_tokens_survives_kept_special_tokens() -> None:
    options = replace(OPTIONS, tool_parser="mistral", reasoning_parser="", skip_special_tokens=False)
    emoji = tekken().encode("🧑‍🚀")
    assert len(emoji) > 3
    stream = opened(options)
    for token in [*emoji, 3, *emoji]:
        stream.feed([token])
    stream.end(FinishReason.STOP)
    assert said(stream.events).content == "🧑‍🚀[INST]🧑‍🚀"


def test_a_vocabulary_that_only_the_library_decodes_keeps_markers() -> None:
    vocabulary = word_piece().vocabulary
    detokenizer = vocabulary.detokenizer(True, (), frozenset(["[UNK]"]))
    assert "".join(map(detokenizer.step, [1, 2])) + detokenizer.flush() == "helloing"


class Failing(Parser):
    """Holds words back, raises at an exclamation mark."""

    kept = ""

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        if "!" in text:
            raise RuntimeError("as asked")
        told, self.kept = self.kept, text
        return [Content(told.upper())] if told else []

    def finish(self) -> list[Event]:
        """See Parser."""
        raise RuntimeError("as asked")

    @property
    def held(self) -> str:
        """See Parser."""
        return self.kept


class Broken(HermesParser):
    """Raises at an exclamation mark, whatever it holds then."""

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        found = super().feed(text)
        if "!" in text:
            self._buffer = "lost"
            raise RuntimeError("as asked")
        return found


@pytest.mark.parametrize("told", ["", "A word. ", "Many words. " * 1000])
@pytest.mark.parametrize("held", ["", " ", "<tool_", '<tool_call>{"name": "f', "<tool_call>" + " " * 20_000])
def test_what_a_failing_parser_held_becomes_content_once(told: str, held: str) -> None:
    stream = ParsedStream(Stream(OPTIONS, byte_level().vocabulary, Limits()), Broken(ParserContext(TOOLS)))
    text = f"{told}{held}! and more"
    stream.feed(byte_level().encode(text))
    stream.end(FinishReason.STOP)
    heard = said(stream.events)
    assert heard.content == text
    assert heard.degraded == {"parser_failed"}


@pytest.mark.parametrize("text", ["one two! three", "one two three"])
def test_a_parser_that_raises_leaves_plain_text(text: str) -> None:
    stream = ParsedStream(Stream(OPTIONS, tekken().vocabulary, Limits()), Failing(ParserContext()))
    for token in tekken().encode(text):
        stream.feed([token])
    stream.end(FinishReason.STOP)
    heard = said(stream.events)
    assert heard.content.lower() == text
    assert heard.degraded == {"parser_failed"}
    assert stream.finish == Finish(FinishReason.STOP, len(tekken().encode(text)))


def plan(**options: Any) -> Any:
    return plan_of(
        replace(OPTIONS, **options), tekken().vocabulary, ParserRegistry(), Limits(max_tools_bytes=10_000), "r"
    )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_parser": "zzzz9"}, "tool_parser"),
        ({"reasoning_parser": "zzzz9"}, "reasoning_parser"),
        ({"reasoning_parser": "os:system"}, "reasoning_parser"),
        ({"tools_json": b"{"}, "tools"),
        ({"tools_json": b"{}"}, "tools"),
        ({"tools_json": b'[{"type": "function"}]'}, "tools[0]"),
        ({"tools_json": b'[{"function": {"name": ""}}]'}, "tools[0]"),
        ({"tools_json": b"[" * 9_000}, "tools"),
        ({"tools_json": b" " * 10_001}, "tools"),
        ({"tool_choice_json": b'"perhaps"'}, "tool_choice"),
        ({"tool_choice_json": b'{"function": {}}'}, "tool_choice"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], param: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        plan(**options)


def test_an_unknown_parser_is_answered_with_those_there_are() -> None:
    with pytest.raises(SluiceError, match=r"'zzzz9' is not available; use one of auto, .*hermes.*"):
        plan(tool_parser="zzzz9")


@pytest.mark.parametrize("more", [{"tool_choice_json": b'"none"'}, {"guided": True}, {"tool_parser": "none"}])
def test_no_calls_where_none_are_wanted(more: dict[str, Any]) -> None:
    made = plan(**more)
    assert (made.names.tool, made.degraded) == ("", "")
    assert made.names.reasoning == "think"


def test_auto_is_what_the_model_needs() -> None:
    auto: dict[str, Any] = {"tool_parser": "auto", "reasoning_parser": "auto"}
    assert plan(**auto).names == ParserNames()
    assert plan(**auto).degraded == "tool_parser_unknown"
    assert plan(**auto, tool_choice_json=b'"required"').degraded == "tool_choice_not_honoured"
    vocabulary = load(ModelSpec("tekken", DEFAULT_SOURCE))
    made = plan_of(replace(OPTIONS, **auto), vocabulary, ParserRegistry(), Limits(), "r")
    assert made.names == ParserNames("mistral", "")
    without = replace(OPTIONS, **auto, tools_json=b"")
    assert plan_of(without, vocabulary, ParserRegistry(), Limits(), "r").names == ParserNames()


@pytest.mark.parametrize(
    ("template", "special", "names"),
    [
        (CHATML, [], ParserNames("hermes", "think")),
        ("<tool_call>\n<function=name>\n<parameter=key>", [], ParserNames("qwen3_coder", "")),
        ("<seed:tool_call>\n<function=name>\n<parameter=key> <seed:think>", [], ParserNames("seed_oss", "seed_oss")),
        ('<function=name>{"key": "value"}</function>', [], ParserNames()),
        ("", ["｜DSML｜", "<｜tool▁call▁begin｜>", "<think>"], ParserNames("deepseek_v32", "think")),
        ("<｜DSML｜invoke", ["<｜tool▁call▁begin｜>"], ParserNames("deepseek_v32", "")),
        ("<|tool_call>call:{{ name }} <|channel>thought", [], ParserNames("gemma4", "gemma4")),
        ("<tool_call>{{ name }}<tool_sep><arg_key>", [], ParserNames("hy_v3", "")),
        ("<|START_THINKING|> <|START_ACTION|>[", [], ParserNames("cohere_command3", "cohere_command3")),
        ("functools[{{ calls }}]", [], ParserNames("phi4_mini_json", "")),
        ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", [], ParserNames("nemotron_deci", "")),
        ("<|tool_call|> Here is my thought process:", [], ParserNames("granite", "granite_thinking")),
        ("<tool_call>{{ name }}<arg_key>", [], ParserNames("glm45", "")),
        ("<minimax:tool_call><invoke name=", [], ParserNames("minimax_m2", "")),
        ("<|tool_call_argument_begin|>", [], ParserNames("kimi_k2", "")),
        ("[TOOL_CALLS]", ["[THINK]"], ParserNames("mistral", "mistral")),
        ("<｜tool▁call▁begin｜> <｜Assistant｜> </think>", [], ParserNames("deepseek_v3", "deepseek_r1")),
        ("<｜tool▁call▁begin｜> <think>", [], ParserNames("deepseek_v3", "think")),
        ("", ["<|channel|>", "<|message|>"], ParserNames("harmony", "harmony")),
        ('{"name": f, "parameters": x}', ["<|python_tag|>"], ParserNames("llama3_json", "")),
        ("[func_name1(params)]", ["<|python_tag|>"], ParserNames("pythonic", "")),
        ("{{ messages }}", [], ParserNames()),
    ],
)
def test_templates_tell_the_parser(tmp_path: Any, template: str, special: list[str], names: ParserNames) -> None:
    config = {"chat_template": [{"name": "default", "template": ""}, {"name": "tool_use", "template": template}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert hints.names_of(tmp_path, frozenset(special)) == names
    (tmp_path / "chat_template.jinja").write_text("{{ plain }}")
    assert hints.names_of(tmp_path, frozenset()) == ParserNames()


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- for tool in tools %}{{ tool }}{% endfor %}", True),
        ("{{ messages }} Use tools.", False),
        ("", False),
    ],
)
def test_templates_that_write_tools_are_recognized(template: str, written: bool) -> None:
    assert hints.writes_tools(template) is written


async def test_model_with_tools_and_without_a_parser_is_warned_of_at_the_start(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build_tiny_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools }}{% endif %}{{ messages }}")
    registry = VocabularyRegistry([ModelSpec("m", str(folder))], 60)
    assert (await registry.get("m")).parsers.tool == ""
    assert "answers with tools are marked; set --tool-parsers" in caplog.text


async def test_an_operator_knows_better() -> None:
    overrides = {"m": ParserNames("hermes", "")}
    library = VocabularyRegistry([ModelSpec("m", DEFAULT_SOURCE)], 60, parsers=overrides)
    assert (await library.get("m")).parsers == ParserNames("hermes", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tool-parsers", "tekken=zzzz9"], "'zzzz9' is not available; use one of"),
        (["--reasoning-parsers", "tekken"], "does not have the form MODEL=PARSER"),
        (["--own-parsers", "os.system"], "does not have the form module:Class"),
    ],
)
def test_parsers_in_the_settings_are_checked_at_the_start(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PostprocessSettings.load(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_settings_name_parsers_by_model() -> None:
    settings_ = PostprocessSettings.load(["--own-parsers", "my.own:Parser", "--tool-parsers", "tekken=my.own:Parser"])
    assert settings_.parsers == {"tekken": ParserNames("my.own:Parser", "")}


@given(st.data())
def test_plain_text_found_at_once_gives_the_events_of_token_by_token_parsing(data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from("ab <>\n/{[").filter(bool), max_size=60)) + data.draw(
        st.sampled_from(["", ANSWER])
    )
    tokens = byte_level().encode(text)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6))
    assert run(tokens, cuts, known=byte_level()) == run(tokens, list(range(len(tokens))), known=byte_level())


def test_parser_that_overrides_feed_alone_sees_every_text() -> None:
    class Loud(HermesParser):
        def feed(self, text: str) -> list[Event]:
            return super().feed(text.upper())

    assert Loud(ParserContext()).plain("plain") is None
    assert HermesParser(ParserContext()).plain("plain") is Content
    stream = ParsedStream(Stream(OPTIONS, byte_level().vocabulary, Limits()), Loud(ParserContext()))
    stream.feed(byte_level().encode("loud"))
    stream.end(FinishReason.STOP)
    assert said(stream.events).content == "LOUD"


@settings(deadline=None, max_examples=30)
@given(st.data())
async def test_rows_of_streams_in_any_messages_have_the_same_output(data: st.DataObject) -> None:
    library = VocabularyRegistry([ModelSpec("m", "x")], 60, lambda spec: tekken().vocabulary)
    await library.load_all()
    options = {1: OPTIONS, 2: StreamOptions("m", eos_token_ids=frozenset([2])), 3: replace(OPTIONS, stop=("你",))}
    most = data.draw(st.sampled_from([4, 1 << 16]))
    outputs = []
    for together in (1, data.draw(st.integers(2, 200))):
        session = PostSession(library, SessionLimits(max_row_tokens=most), Metrics(), lambda: None)
        for slot, each in options.items():
            session.open(slot, str(slot), each, {})
        rows = [(slot, token) for token in [*tekken().encode(ANSWER), 2, 7] for slot in options]
        for start in range(0, len(rows), together):
            slots, tokens = zip(*rows[start : start + together], strict=True)
            session.feed(array("I", slots), array("I", [1] * len(slots)), array("I", tokens))
        batch = session.drain()
        assert batch is not None
        outputs.append((batch.text, dict(batch.events), dict(batch.finishes)))
        await session.aclose()
    assert outputs[0] == outputs[1]


async def test_a_session_tells_events_in_order_and_plain_streams_keep_their_column() -> None:
    library = VocabularyRegistry([ModelSpec("m", "x")], 60, lambda spec: tekken().vocabulary)
    await library.load_all()
    session = PostSession(library, SessionLimits(), Metrics(), lambda: None)
    session.open(1, "one", OPTIONS, {})
    session.open(2, "two", StreamOptions("m"), {})
    tokens = tekken().encode(ANSWER)
    for token in [*tokens, 2]:
        session.feed(array("I", [1, 2]), array("I", [1, 1]), array("I", [token, token]))
    batch = to_text_batch(session.drain(), session.refuse)
    assert batch is not None
    assert batch.text == ANSWER
    kinds = [
        "reasoning" if event.reasoning else "text" if event.text else "calls" if event.tool_calls else "finish"
        for event in batch.events
    ]
    assert kinds == ["reasoning", "text", "calls", "finish"]
    assert {event.slot for event in batch.events} == {1}
    (call,) = batch.events[2].tool_calls
    assert (call.index, call.name, json.loads(call.arguments)) == (0, "get_weather", json.loads(CALL)["arguments"])
    assert batch.events[-1].reasoning_tokens > 0
    session.open(3, "three", replace(OPTIONS, tool_parser="auto"), {})
    degraded = to_text_batch(session.drain(), session.refuse)
    assert degraded is not None
    assert [event.degraded for event in degraded.events] == ["tool_parser_unknown"]
    session.open(4, "four", OPTIONS, {})
    session.feed(array("I", [4]), array("I", [len(tokens)]), array("I", tokens))
    session.close([4])
    assert session.drain() is None
    await session.aclose()


def test_bundled_tokenizer_has_the_marker_at_the_expected_id() -> None:
    assert tekken().vocabulary.text_of([TOOL_CALLS_ID]) == "[TOOL_CALLS]"
    assert HermesParser.markers == {"<tool_call>", "</tool_call>"}
    assert resolve(DEFAULT_SOURCE).is_file()
