"""What each parser makes of answers as the models write them."""

from __future__ import annotations

import json

import pytest

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart
from services.postprocess.parsers.registry import build
from tests.support.oracles.parsing import TOOLS, ParsedDelta, parsed

CITY = '{"city": "Zürich 🌧️"}'


def one(tool: str, text: str, reasoning: str = "", **more: object) -> ParsedDelta:
    context = ParserContext(TOOLS, identity="r", **more)  # type: ignore[arg-type]
    return parsed(ParserNames(tool, reasoning), [text], context)


def calls(message: ParsedDelta) -> list[tuple[str, str]]:
    return [call[:2] for call in message.calls]


SHAPES = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "f", "parameters": {{}}}}',
    "pythonic": '[get_weather(city="Zürich 🌧️"), f()]',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "f", "arguments": {{}}}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{CITY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 🌧️\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich 🌧️</arg_value>\n</tool_call>\n"
    "<tool_call>f\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich 🌧️</parameter>\n'
    '</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{CITY}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "f", "arguments": {{}}}}]',
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}<|call|><|start|>"
    "assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>",
}


@pytest.mark.parametrize("name", SHAPES)
def test_parallel_calls_with_the_arguments_as_written(name: str) -> None:
    said = one(name, SHAPES[name])
    assert calls(said) == [("get_weather", CITY), ("f", "{}")]
    assert (said.content, said.reasoning, said.degraded) == ("", "", frozenset())


@pytest.mark.parametrize(("name", "length", "prefix"), [("mistral", 9, ""), ("hermes", 29, "call_")])
def test_ids_are_unique_of_the_models_form_and_the_same_again(name: str, length: int, prefix: str) -> None:
    ids = [call[2] for call in one(name, SHAPES[name]).calls]
    assert len(set(ids)) == 2
    assert all(len(id_) == length and id_.startswith(prefix) and id_.removeprefix(prefix).isalnum() for id_ in ids)
    assert ids == [call[2] for call in one(name, SHAPES[name]).calls], "a replayed stream says the same"
    other = parsed(ParserNames(name), [SHAPES[name]], ParserContext(TOOLS, identity="another"))
    assert not set(ids) & {call[2] for call in other.calls}


def test_an_id_that_the_model_gives_is_kept() -> None:
    assert one("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}").calls == (("f", "{}", "a1b2c3d4e"),)
    again = one("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}')
    assert len({call[2] for call in again.calls}) == 2


@pytest.mark.parametrize("name", SHAPES)
def test_arguments_are_streamed_before_they_are_complete(name: str) -> None:
    text = SHAPES[name]
    cut = text.index("Zürich") + 3
    parser = build(ParserNames(name), ParserContext(TOOLS))
    events = [event for char in text[:cut] for event in parser.feed(char)]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["get_weather"]
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"city": "Zür'


def test_values_between_tags_have_the_types_of_the_schema() -> None:
    tags = "".join(
        f"<parameter={key}>\n{value}\n</parameter>"
        for key, value in (("city", "007"), ("days", " 3 "), ("flag", "True"), ("list", "[1, 'x']"), ("nan", "NaN"))
    )
    said = one("qwen3_coder", f"<function=get_weather>{tags}</function>")
    assert said.degraded == frozenset()
    assert json.loads(said.calls[0][1]) == {"city": "007", "days": 3, "flag": "True", "list": "[1, 'x']", "nan": "NaN"}


def test_missing_outer_tags_parse_and_line_breaks_in_values_stay() -> None:
    said = one("qwen3_coder", "<function=f><parameter=city>\n\na\n\n</parameter></function>")
    assert json.loads(said.calls[0][1]) == {"city": "\na\n"}


NOTHING = {
    "hermes": '<tool_call>{"name": "f", "arguments": null}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": null}',
    "mistral": '[TOOL_CALLS][{"arguments": null, "name": "f"}]',
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>",
    "deepseek_r1": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n\n```<｜tool▁call▁end｜>",
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_call_without_arguments_takes_nothing_of_what_follows(name: str) -> None:
    text = f"{NOTHING[name]}\n{SHAPES.get(name, SHAPES['deepseek_v3'])}"
    for size in (1, 2, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        said = parsed(ParserNames(name), pieces)
        assert [call[0] for call in said.calls] == ["f", "get_weather", "f"]
        assert [json.loads(call[1]) for call in said.calls] == [{}, json.loads(CITY), {}]
        assert (said.content, said.degraded) == ("", frozenset())


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3"])
def test_a_call_that_never_ends_does_not_lend_its_name_to_the_next(name: str) -> None:
    broken = NOTHING[name].rpartition("<")[0]
    said = one(name, f"{broken}\n{SHAPES[name]}")
    assert [call[0] for call in said.calls] == ["get_weather", "f"]
    assert said.degraded == {"tool_call_malformed"}
    assert broken in said.content


def test_text_after_a_call_that_no_marker_announced_is_just_text() -> None:
    said = one("pythonic", "[f()] There.")
    assert (said.content, said.degraded) == (" There.", frozenset())


def test_ids_of_kimi_are_those_of_the_model() -> None:
    assert [call[2] for call in one("kimi_k2", SHAPES["kimi_k2"]).calls] == ["functions.get_weather:0", "functions.f:1"]


MALFORMED = {
    "hermes": "<tool_call>{'name': 'f'}</tool_call>",
    "mistral": "[TOOL_CALLS]{no",
    "deepseek_v3": "<｜tool▁call▁begin｜>what<｜tool▁sep｜>f\n```json\n{}",
    "llama3_json": "<|python_tag|>print(1)",
    "pythonic": "<|python_start|>print 1",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_text_and_marked(name: str) -> None:
    said = one(name, MALFORMED[name])
    assert said.content == MALFORMED[name]
    assert said.calls == ()
    assert said.degraded == {"tool_call_malformed"}


def test_arguments_that_go_wrong_stay_arguments_up_to_the_end_marker() -> None:
    said = one("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> and more')
    assert calls(said) == [("f", '{"a": oops}}')]
    assert (said.content, said.degraded) == (" and more", frozenset({"tool_call_malformed"}))


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "deepseek_v3"])
def test_a_call_that_is_cut_off_keeps_what_it_has(name: str) -> None:
    text = SHAPES[name]
    said = one(name, text[: text.index("Zürich") + 6])
    assert calls(said) == [("get_weather", '{"city": "Zürich')]
    assert said.degraded == {"tool_call_incomplete"}


def test_an_ordinary_answer_in_json_is_no_call() -> None:
    for text in ('{"name": "Bob", "age": 3}', '{"name": "unknown_tool", "parameters": {}}', "{", '{"a": [1]} text'):
        assert one("llama3_json", text) == ParsedDelta(text, "", (), frozenset(), ("Content",))
    for text in ("[1, 2]", "[unknown(a=1)]", "[see](http://x)", "["):
        assert one("pythonic", text) == ParsedDelta(text, "", (), frozenset(), ("Content",))


def test_pythonic_arguments_become_json() -> None:
    text = "[f(a='it\\'s \"x\"', b=[True, None, -2.5,], c={'k': {}, }, d=\"\\u00e9\\x41\\n\\q\", e = 'line\nbreak')]"
    said = one("pythonic", text)
    assert said.degraded == frozenset()
    assert json.loads(said.calls[0][1]) == {
        "a": 'it\'s "x"',
        "b": [True, None, -2.5],
        "c": {"k": {}},
        "d": "éA\n\\q",
        "e": "line\nbreak",
    }


def test_white_space_beside_markup_belongs_to_it() -> None:
    said = one("hermes", f"<think>\n a \n</think>\n\nLook:\n\n{SHAPES['hermes']}\n \n", "think")
    assert (said.reasoning, said.content) == ("a", "Look:")
    assert one("hermes", "  two \n words \n").content == "  two \n words \n"


def test_reasoning_and_call_in_one_piece() -> None:
    said = one("hermes", f"<think>hm</think>{SHAPES['hermes']}", "think")
    assert said.order == ("Reasoning", "CallStart", "CallArguments", "CallStart", "CallArguments")


@pytest.mark.parametrize(
    ("name", "tail", "text", "reasoning", "content"),
    [
        ("think", "<|im_start|>assistant\n", "<think>a</think>b", "a", "b"),
        ("think", "assistant\n<think>\n", "a</think>b", "a", "b"),
        ("think", "assistant\n<think>\n", "<think>a</think>b", "a", "b"),
        ("think", "assistant\n<think>\n\n</think>\n\n", "<think>a</think>b", "", "<think>a</think>b"),
        ("think", "assistant\n", "a</think>b", "", "a</think>b"),
        ("think", "user: what is <think>?\nassistant\n", "a</think>b", "", "a</think>b"),
        ("deepseek_r1", "<｜Assistant｜>", "a</think>b", "a", "b"),
        ("deepseek_r1", "<｜Assistant｜></think>", "ab", "", "ab"),
        ("mistral", "[/INST]", "[THINK]a[/THINK]b", "a", "b"),
    ],
)
def test_whether_the_model_thinks_is_seen_in_the_prompt_and_the_answer(
    name: str, tail: str, text: str, reasoning: str, content: str
) -> None:
    said = one("", text, name, prompt_tail=tail)
    assert (said.reasoning, said.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "tail", "text", "reasoning"),
    [
        ("deepseek_r1", "", '{"a": 1}', ""),
        ("think", "<think>\n", ' {"a": 1}', ""),
        ("think", "<think>\n", 'I think.</think>{"a": 1}', "I think."),
        ("think", "", '<think>I think.</think>{"a": 1}', "I think."),
    ],
)
def test_guided_output_is_never_reasoning(name: str, tail: str, text: str, reasoning: str) -> None:
    said = one("", text, name, prompt_tail=tail, guided=True)
    assert (said.reasoning, json.loads(said.content)) == (reasoning, {"a": 1})


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary<|message|>First: <|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>\n"
        "<|start|>assistant<|channel|>final<|message|>Done. 😀"
    )
    said = one("harmony", text, "harmony")
    assert (said.reasoning, said.content, calls(said)) == ("I look.", "First: Done. 😀", [("f", "{}")])
    assert said.degraded == frozenset()
    begun = one("", "Short.<|end|>", "harmony", prompt_tail="<|start|>assistant<|channel|>final<|message|>")
    assert begun.content == "Short."
    assert one("harmony", "<|channel|>commentary to=f<|message|>{oops<|call|>").degraded == {"tool_call_malformed"}
    assert one("harmony", "<|channel|>commentary to=f<|message|>").calls[0][:2] == ("f", "{}")


def test_only_calls_that_the_request_allows() -> None:
    named = one("hermes", SHAPES["hermes"], only="f")
    assert calls(named) == [("f", "{}")]
    assert '"get_weather"' in named.content
    assert named.degraded == {"tool_choice_not_honoured"}
    single = one("hermes", SHAPES["hermes"], single=True)
    assert calls(single) == [("get_weather", CITY)]
    assert '"name": "f"' in single.content
    assert one("hermes", "no", required=True).degraded == {"tool_choice_not_honoured"}
    assert one("hermes", SHAPES["hermes"], required=True).degraded == frozenset()


def test_a_head_that_never_ends_is_text() -> None:
    text = '<tool_call>{"id": "' + "x" * 70_000
    assert one("hermes", text).content == text
    held = parsed(ParserNames("hermes"), [text[:60_000], text[60_000:]], ParserContext(TOOLS))
    assert held.content == text
    assert one("mistral", "[TOOL_CALLS]" + "y" * 600).content == "[TOOL_CALLS]" + "y" * 600


def test_deep_nesting_is_refused_not_followed() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 10_000
    assert one("hermes", text).degraded == {"tool_call_malformed"}
