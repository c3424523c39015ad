"""Invalid, broken and hostile input: one typed error, in bounded time and memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import DEFAULT_SOURCE, ModelSpec, resolve
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.contract.validation import as_json, checked_chat, parse_chat
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.engines.tokenizer import chat_argument
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.loaded_tokenizers import limits, tekken, tiny_folder, tiny_hf
from tests.support.data.tiny_models import TURN_END
from tests.support.oracles.errors import raises_error

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def call(name: Any = "f", arguments: Any = "{}", **extra: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **extra}


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ({}, "messages"),
    ("hi", "messages"),
    (None, "messages"),
    ([7], "messages[0]"),
    ([USER, {"content": "x"}], "messages[1].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([USER, USER, {"role": "user"}], "messages[2].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "assistant"}], "messages[0].content"),
    ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        "messages[0].content[1].type",
    ),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "tool", "content": "x", "tool_call_id": True}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [call(name="")]}], "messages[0].tool_calls[0].function.name"),
    ([{"role": "assistant", "tool_calls": [call(arguments=[1])]}], "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "tool_calls": [call(type="shell")]}], "messages[0].tool_calls[0].type"),
    ([{"role": "assistant", "tool_calls": [call(id=5)]}], "messages[0].tool_calls[0].id"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_a_bad_message_is_refused_naming_its_field(messages: Any, param: str) -> None:
    data = json.dumps(messages).encode() if messages is not None else b""
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param) as caught:
        parse_chat(data)
    assert caught.value.message.endswith(".")


def test_an_image_is_refused_as_not_supported() -> None:
    with pytest.raises(SluiceError, match="'image_url' is not supported"):
        parse_chat(json.dumps([{"role": "user", "content": [{"type": "image_url"}]}]).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[NaN]",
        b'[{"role": "user", "content": "\xff"}]',
        b'[{"role": "user", "content": "\\ud800"}]',
    ],
    ids=["cut", "nan", "no utf-8", "lone surrogate"],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with raises_error(match="messages is not valid JSON", param="messages"):
        parse_chat(data)


BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"tools_json": {}}, "tools"),
    ({"tools_json": [5]}, "tools[0]"),
    ({"tools_json": [TOOL, {"type": "function"}]}, "tools[1].function"),
    ({"tools_json": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
    ({"tools_json": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools_json": [{"function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tool_choice_json": "sometimes"}, "tool_choice"),
    ({"tool_choice_json": 5}, "tool_choice"),
    ({"tool_choice_json": "required"}, "tool_choice"),
    ({"tool_choice_json": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools_json": [TOOL], "tool_choice_json": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools_json": [TOOL], "tool_choice_json": {"type": "function"}}, "tool_choice.function"),
    ({"template_kwargs_json": []}, "chat_template_kwargs"),
    ({"template_kwargs_json": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"template_kwargs_json": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ({"documents_json": {}}, "documents"),
    ({"documents_json": ["x"]}, "documents"),
]


@pytest.mark.parametrize(("parts", "param"), BAD_PARTS)
def test_a_bad_part_is_refused_naming_its_field(parts: dict[str, Any], param: str) -> None:
    fields: dict[str, Any] = {name: json.dumps(part).encode() for name, part in parts.items()}
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        parse_chat(json.dumps([USER]).encode(), **fields)


def test_opening_a_new_turn_and_continuing_the_last_exclude_each_other() -> None:
    with raises_error(param="continue_final_message"):
        parse_chat(json.dumps([USER]).encode(), add_generation_prompt=True, continue_final_message=True)


def test_a_good_chat_arrives_as_written() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "ü"}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call()], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    chat = parse_chat(
        json.dumps(messages).encode(),
        json.dumps([TOOL]).encode(),
        b'{"enable_thinking": false}',
        b'[{"title": "t"}]',
        b'{"type": "function", "function": {"name": "get_weather"}}',
    )
    assert chat.messages == messages
    assert chat.tools == chat.prompt_tools == [TOOL]
    assert chat.template_kwargs == {"enable_thinking": False}
    assert chat.documents == [{"title": "t"}]


def test_with_tool_choice_none_the_prompt_holds_no_tools() -> None:
    chat = parse_chat(json.dumps([USER]).encode(), json.dumps([TOOL]).encode(), tool_choice_json=b'"none"')
    assert chat.prompt_tools is None


def test_empty_lists_are_unset() -> None:
    chat = parse_chat(json.dumps([USER]).encode(), b"[]", b"{}", b"[]", b"null")
    assert (chat.tools, chat.template_kwargs, chat.documents, chat.tool_choice) == (None, {}, None, None)


GENEROUS_S = 60.0
T = TypeVar("T")
MODELS = {"hf": tiny_hf, "mistral": tekken}


def outcome(call: Callable[[], T]) -> T | SluiceError:
    """What a call gives, or the typed error that it ends in; anything else fails the test."""
    try:
        return call()
    except SluiceError as error:
        return error


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


CYCLIC = {
    "itself": {"$ref": "#"},
    "two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "elsewhere": {"$ref": "https://example.org/schema.json"},
    "tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schema", CYCLIC)
def test_schemas_that_point_at_themselves_are_never_followed(model: str, schema: str) -> None:
    tokenizer = MODELS[model]()
    assert len(tokenizer.encode_chat(ChatRequest([USER], tools=[tool(CYCLIC[schema])]))) > 10


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("depth", [20, 200, 400, 900])
def test_deep_schemas_become_ids_or_one_sentence(model: str, depth: int) -> None:
    tokenizer = MODELS[model]()
    data = json.dumps([tool(nested(depth // 2))]).encode()
    made = outcome(lambda: tokenizer.encode_chat(parse_chat(json.dumps([USER]).encode(), data)))
    if isinstance(made, SluiceError):
        assert made.kind is ErrorKind.INVALID_ARGUMENT
        assert made.param in ("tools", "chat_template")
        assert depth > 20
    else:
        assert len(made) > depth
    assert tokenizer.encode_chat(ChatRequest([USER]))


@pytest.mark.parametrize("depth", [100, 400, 900])
@pytest.mark.parametrize("where", ["messages", "tools", "chat_template_kwargs"])
def test_deep_chats_are_rendered_by_another_process_or_refused_in_one_sentence(where: str, depth: int) -> None:
    deep = f'{{"x": {"[" * depth}{"]" * depth}}}'
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
    chat = checked_chat(
        json.loads(f'[{{"role": "user", "content": "hi", "more": {deep if where == "messages" else "0"}}}]'),
        json.loads(tools) if where == "tools" else None,
        json.loads(deep) if where == "chat_template_kwargs" else None,
        chat_template="{{ messages[0].content }}",
    )
    made = outcome(lambda: tiny_hf().render(chat))
    sent = outcome(lambda: as_json(chat_argument(chat)))
    if depth > 100:
        for refused in (made, sent):
            assert isinstance(refused, SluiceError)
            assert (refused.kind, refused.param) == (ErrorKind.INVALID_ARGUMENT, "messages")
    else:
        assert made == "hi"
        assert isinstance(sent, bytes)


@pytest.mark.parametrize("parameters", [{"type": "nonsense"}, {"properties": 5}, {"required": "x"}, {"type": 7}])
def test_schemas_that_are_none_are_refused_where_the_engine_refuses_them(parameters: dict[str, Any]) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="tools"):
        tekken().encode_chat(ChatRequest([USER], tools=[tool(parameters)]))
    assert tiny_hf().encode_chat(ChatRequest([USER], tools=[tool(parameters)]))  # its template shows what it is given


def test_special_tokens_typed_by_a_user_are_what_the_engines_make_of_them() -> None:
    """Engines tokenize the rendered text, where a typed token cannot be told from the template's own; Mistral's can."""
    typed = [{"role": "user", "content": f"a{TURN_END}b"}]
    control = tiny_hf()._tokenizer.token_to_id(TURN_END)
    assert control is not None
    assert tiny_hf().encode_chat(ChatRequest(typed)).count(control) == 2
    mistral_typed = [{"role": "user", "content": "a</s>[/INST]b"}]
    ids = tekken().encode_chat(ChatRequest(mistral_typed))
    assert [token for token in ids if token < 1000] == [1, 3, 4]


HUGE = {  # as large as the default settings let in; plain words larger still
    "words": "word " * 2_000_000,
    "one letter": "a" * 4_000_000,
    "white space": " " * 4_000_000,
    "emoji": "😀" * 1_000_000,
    "control tokens": TURN_END * 400_000,
}
SLOWER = ("one letter", "white space")


@pytest.mark.parametrize(("content", "fast"), [*((name, True) for name in HUGE), *((name, False) for name in SLOWER)])
@pytest.mark.parametrize("model", MODELS)
def test_huge_texts_end_in_bounded_time_and_memory(model: str, content: str, fast: bool) -> None:
    tokenizer = tokenizer_of(model, fast)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, monotonic()
    made = outcome(lambda: tokenizer.pack_text(HUGE[content]))
    if isinstance(made, SluiceError):
        assert (made.kind, made.param, content) == (ErrorKind.INVALID_ARGUMENT, "prompt", "white space")
    else:
        assert len(made) > 10_000
    assert monotonic() - started < GENEROUS_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20  # KiB
    assert tokenizer.encode_chat(ChatRequest([USER]))


_LOADED: dict[tuple[str, bool], TokenizerProtocol] = {}


def tokenizer_of(model: str, fast: bool) -> TokenizerProtocol:
    if fast:
        return MODELS[model]()
    if (model, fast) not in _LOADED:
        encoder_options = EncoderOptions(fast_backend=False, cache_bytes=0)
        made = (
            HfTokenizer(tiny_folder(), limits(), encoder_options)
            if model == "hf"
            else MistralTokenizer(resolve(DEFAULT_SOURCE), encoder_options)
        )
        _LOADED[model, fast] = made
    return _LOADED[model, fast]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 5}', b'{"added_tokens": [5]}'])
def test_a_broken_file_of_a_model_is_one_sentence(name: str, content: bytes, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder(), tmp_path / "model"))
    (folder / name).write_bytes(content)
    loaded = outcome(lambda: load_tokenizer(ModelSpec("m", str(folder)), limits()))
    if isinstance(loaded, SluiceError):
        assert loaded.kind in (ErrorKind.FAILED_PRECONDITION, ErrorKind.INVALID_ARGUMENT)
        assert loaded.param == "model"
        assert "\n" not in loaded.message
    else:
        assert name != "tokenizer.json"
        assert content.startswith(b'{"')  # a JSON object without what is looked for is no fault
        assert loaded.encode_text("hi")


@given(st.floats(0, 1), st.binary(max_size=4), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_tokenizer_json_loads_or_is_one_sentence(tmp_path: Path, place: float, put: bytes, cut: bool) -> None:
    whole = (tiny_folder() / "tokenizer.json").read_bytes()
    at = int(place * len(whole))
    (tmp_path / "tokenizer.json").write_bytes(whole[:at] + put + (b"" if cut else whole[at + len(put) :]))
    loaded = outcome(lambda: load_tokenizer(ModelSpec("m", str(tmp_path)), limits()))
    if isinstance(loaded, SluiceError):
        assert loaded.kind is ErrorKind.FAILED_PRECONDITION
        assert loaded.message.endswith(".")
        assert "\n" not in loaded.message
    else:
        loaded.encode_text("hello world")


@pytest.mark.parametrize("keep", [0, 1, 1000, 1_000_000])
def test_a_cut_tekken_file_is_one_sentence(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "tekken.json"
    file.write_bytes(resolve(DEFAULT_SOURCE).read_bytes()[:keep])
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION) as caught:
        load_tokenizer(ModelSpec("m", str(tmp_path)), limits())
    assert "\n" not in caught.value.message


BRIEF = {"type": "text", "text": "Be brief."}
BILLED = "x-anthropic-billing-header: cc_version=9; cch=aaa11;"


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (f"{BILLED}\nBe brief.\nx", ["Be brief.\nx"]),
        (BILLED, []),
        ([{"type": "text", "text": BILLED}, BRIEF], [[BRIEF]]),
        ([{"type": "text", "text": f"{BILLED}\nBe brief."}], [[BRIEF]]),
        (f"Be brief.\n{BILLED}", [f"Be brief.\n{BILLED}"]),
    ],
    ids=["line", "alone", "block", "line of a block", "elsewhere"],
)  # fmt: skip
def test_billing_line_of_the_first_instructions_is_left_out(content: Any, kept: list[Any]) -> None:
    messages = parse_chat(json.dumps([{"role": "system", "content": content}, USER]).encode()).messages
    assert messages == [*({"role": "system", "content": text} for text in kept), USER]


def test_billing_line_of_a_user_is_kept() -> None:
    messages = [{"role": "user", "content": BILLED}]
    assert parse_chat(json.dumps(messages).encode()).messages == messages
