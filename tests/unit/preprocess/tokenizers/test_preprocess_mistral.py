from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Reference

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import unpack_u32
from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.encoders.mistral_plain import PlainEncoder
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.loaded_tokenizers import tekken
from tests.support.odd_histories import History, histories
from tests.support.oracles.errors import raises_error

USER = {"role": "user", "content": "What is the weather?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


@cache
def reference() -> Reference[Any, Any, Any, Any, Any]:
    """mistral-common as it is, not the one that this suite's tokenizer lends its own encoder."""
    return Reference.from_file(resolve(DEFAULT_SOURCE))


def expected_ids(messages: list[dict[str, Any]], **extra: Any) -> list[int]:
    ids: list[int] = reference().encode_chat_completion(ChatCompletionRequest.from_openai(messages, **extra)).tokens
    return ids


def call(call_id: str, **function: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": "{}"} | function}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["[INST]", "</s>", " ", "  a  ", "\n\n", "😀 ü", "<s>[/INST]", "x" * 300, "1234567"]
)
plain_messages = st.builds(
    lambda system, turns, last: [
        *([{"role": "system", "content": system}] if system is not None else []),
        *(
            message
            for user, assistant in turns
            for message in ({"role": "user", "content": user}, {"role": "assistant", "content": assistant})
        ),
        {"role": "user", "content": last},
    ],
    st.none() | texts,
    st.lists(st.tuples(texts, texts.filter(bool)), max_size=4),
    texts,
)


@given(plain_messages)
@settings(max_examples=300, deadline=None)
def test_the_short_way_gives_mistral_commons_ids(messages: list[dict[str, Any]]) -> None:
    plain = tekken()._plain
    assert plain is not None
    ids = plain.pack(ChatRequest(messages))
    assert ids is not None or messages[0] == {"role": "system", "content": ""}
    assert tekken().encode_chat(ChatRequest(messages)) == expected_ids(messages)


any_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "user"]), "content": texts},
    ),
    min_size=1,
    max_size=6,
)


def in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System messages after the model's turn as user messages; the format has no place for them."""
    before = [{}, *messages]
    return [
        {**message, "role": "user"} if message["role"] == "system" and after.get("role") == "assistant" else message
        for after, message in zip(before, messages, strict=False)
    ]


@given(any_messages)
@settings(max_examples=300, deadline=None)
def test_whatever_the_order_ids_are_mistral_commons_or_an_error_where_it_has_one(
    messages: list[dict[str, Any]],
) -> None:
    final_is_open = messages[-1]["role"] == "assistant"
    try:
        ours: list[int] | None = tekken().encode_chat(ChatRequest(messages))
    except SluiceError:
        ours = None
    try:
        theirs: list[int] | None = expected_ids(in_order(messages), continue_final_message=final_is_open)
    except Exception:  # whatever it raises, the request is one it refuses; ours may fit it
        return
    assert ours == theirs


@pytest.mark.parametrize(
    "chat",
    [
        ChatRequest([USER], tools=[TOOL]),
        ChatRequest([USER], tools=[TOOL], tool_choice="auto"),
        ChatRequest([USER, {"role": "assistant", "content": None, "tool_calls": [call("abcdefgh1")]},
                     {"role": "tool", "content": "sunny", "tool_call_id": "abcdefgh1"}], tools=[TOOL]),
        ChatRequest([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
        ChatRequest([{"role": "developer", "content": "Be brief."}, USER]),
        ChatRequest([USER, {"role": "system", "content": "Be brief."}, USER]),
    ],
    ids=["tools", "tools auto", "call and result", "parts", "developer", "late system"],
)  # fmt: skip
def test_other_chats_give_mistral_commons_ids(chat: ChatRequest) -> None:
    assert tekken().encode_chat(chat) == expected_ids(chat.messages, tools=chat.tools)


def test_with_tool_choice_none_tools_stay_out_of_the_prompt() -> None:
    assert tekken().encode_chat(ChatRequest([USER], tools=[TOOL], tool_choice="none")) == expected_ids([USER])


def test_render_spells_the_ids_out() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert tekken().render(ChatRequest(messages)) == "<s>[INST]Be brief.\n\nWhat is the weather?[/INST]"
    assert tekken().decode(tekken().encode_chat(ChatRequest(messages))) == tekken().render(ChatRequest(messages))


def test_typed_control_tokens_stay_text() -> None:
    typed = "</s><s>[INST]x[/INST][TOOL_CALLS]"
    special = set(range(1000))
    (bos, begin, *inner, end) = tekken().encode_chat(ChatRequest([{"role": "user", "content": typed}]))
    assert {bos, begin, end} <= special
    assert not special & set(inner)
    assert tekken().decode(inner) == typed
    assert not special & set(tekken().encode_text(typed, add_special_tokens=False))


@pytest.mark.parametrize("flag", [None, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_final_message_of_the_assistant_is_continued(explicit: bool, flag: bool | None) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    chat = ChatRequest(messages, continue_final_message=explicit, add_generation_prompt=flag)
    assert tekken().render(chat) == "<s>[INST]What is the weather?[/INST]It is"


@pytest.mark.parametrize(
    ("call_id", "stands_for"),
    [("abcDEF123", "abcDEF123"), ("call_0123456789abc", "456789abc"), ("chatcmpl-tool-a1b2c3d4e5", "1b2c3d4e5")],
)
def test_tool_call_ids_are_shortened_the_way_engines_do(call_id: str, stands_for: str) -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": [call(call_id)]},
        {"role": "tool", "content": "1", "tool_call_id": call_id},
    ]
    assert tekken().render(ChatRequest(messages)).count(stands_for) == 2


@pytest.mark.parametrize("call_id", ["c1", "call_1", "1-2-3-4-5-6", "ünïcödé99"])
def test_tool_call_ids_of_any_form_work_and_match(call_id: str) -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": [call(call_id)]},
        {"role": "tool", "content": "1", "tool_call_id": call_id},
    ]
    text = tekken().render(ChatRequest(messages))
    (called,) = json.loads(text.split("[TOOL_CALLS]")[1].split("</s>")[0])
    result = json.loads(text.split("[TOOL_RESULTS]")[1].split("[/TOOL_RESULTS]")[0])
    assert called["id"] == result["call_id"]


def test_reasoning_of_earlier_turns_is_left_out() -> None:
    answer = {"role": "assistant", "content": "Sunny."}
    thoughtful = answer | {"reasoning_content": "hm", "reasoning": "hm"}
    with_tools = ChatRequest([USER, thoughtful, USER], tools=[TOOL])
    assert tekken().encode_chat(with_tools) == expected_ids([USER, answer, USER], tools=[TOOL])
    assert tekken().encode_chat(ChatRequest([USER, thoughtful, USER])) == expected_ids([USER, answer, USER])


REFUSED: list[tuple[ChatRequest, str, str]] = [
    (ChatRequest([{"role": "assistant", "content": "x"}]), "messages", "start with a user message"),
    (ChatRequest([USER, {"role": "tool", "content": "x"}]), "messages[1].tool_call_id", "is missing"),
    (ChatRequest([USER], tools=[{"type": "function", "function": {"name": "a b"}}]), "tools", "Function name was a b"),
    (ChatRequest([USER], tools=[{"function": {"name": "a", "parameters": {"type": "x"}}}]), "tools", "tool schema"),
    (ChatRequest([USER], chat_template="x"), "chat_template", "not support chat templates"),
    (ChatRequest([USER], documents=[{}]), "documents", "not support documents"),
    (ChatRequest([USER], template_kwargs={"date_string": "x"}), "chat_template_kwargs.date_string", "omit it"),
    (ChatRequest([USER], continue_final_message=True), "continue_final_message", "Only an assistant message"),
]  # fmt: skip


@pytest.mark.parametrize(("chat", "param", "sentence"), REFUSED)
def test_what_the_model_cannot_take_is_one_sentence(chat: ChatRequest, param: str, sentence: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param) as caught:
        tekken().encode_chat(chat)
    assert sentence in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")


def test_runs_that_break_mistral_commons_encoder_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    slow = MistralTokenizer(resolve("mistral-common:tekken_240718"), EncoderOptions(fast_backend=False))
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": " " * 1_000_000}]
    with raises_error(match="whitespace that is too long", kind=ErrorKind.INVALID_ARGUMENT, param="messages"):
        slow.encode_chat(ChatRequest(messages))
    with raises_error(param="prompt"):
        slow.encode_text(" " * 1_000_000)
    assert "panicked" not in capfd.readouterr().err
    assert slow.encode_chat(ChatRequest([USER]))


def test_the_self_check_switches_the_short_way_off_where_ids_differ() -> None:
    right = tekken()._plain
    assert right is not None
    assert right._agrees_with(reference())
    bos, eos, begin, end = (unpack_u32(ids)[0] for ids in (right._bos, right._eos, right._begin, right._end))
    assert PlainEncoder(right._pack, (bos, eos, begin, end))._agrees_with(reference())
    wrong = PlainEncoder(right._pack, (bos, eos, end, begin))
    assert not wrong._agrees_with(reference())


def test_text_gets_a_bos_by_default() -> None:
    plain = reference().instruct_tokenizer.tokenizer
    assert tekken().encode_text("hello") == plain.encode("hello", bos=True, eos=False)
    assert tekken().encode_text("hello", add_special_tokens=False) == plain.encode("hello", bos=False, eos=False)


@given(texts)
@settings(max_examples=200, deadline=None)
def test_text_survives_tokenizing(text: str) -> None:
    ids = tekken().encode_text(text)
    assert tekken().decode(ids, skip_special_tokens=True) == text
    assert tekken().decode(ids) == "<s>" + text


def test_facts() -> None:
    facts = tekken().facts
    assert (facts.processor, facts.vocab_size, facts.eos_ids, facts.context_length) == ("mistral", 131072, (2,), 0)
    assert facts.has_chat_template


def test_a_folder_with_a_tekken_file_works(tmp_path: Any) -> None:
    (tmp_path / "tekken.json").symlink_to(resolve("mistral-common:tekken_240718"))
    (tmp_path / "params.json").write_text('{"max_seq_len": 32768}')
    tokenizer = MistralTokenizer(tmp_path)
    assert tokenizer.facts.context_length == 32768
    assert tokenizer.render(ChatRequest([USER])) == "<s>[INST]What is the weather?[/INST]"


def test_system_message_after_the_models_turn_is_tokenized_as_a_user_message() -> None:
    said, more = {"role": "assistant", "content": "Rainy."}, {"role": "system", "content": "Be brief."}
    found = tekken().encode_chat(ChatRequest([USER, said, more, USER]))
    assert found == expected_ids([USER, said, {**more, "role": "user"}, USER])


@pytest.mark.parametrize("empty", ["", []])
@pytest.mark.parametrize("thought", [{}, {"reasoning_content": "hm"}])
def test_empty_turn_of_the_assistant_is_left_out(empty: Any, thought: dict[str, str]) -> None:
    chat = ChatRequest([USER, {"role": "assistant", "content": empty, **thought}, USER])
    assert tekken().encode_chat(chat) == expected_ids([USER, USER])
    assert tekken().encode_chat(ChatRequest(chat.messages[:2])) == expected_ids([USER])


def test_text_and_calls_in_one_turn_are_the_tokens_that_the_model_generated() -> None:
    said = {"role": "assistant", "content": "I look.", "tool_calls": [call("abcdefgh1")]}
    text = tekken().render(ChatRequest([USER, said, {"role": "tool", "content": "1", "tool_call_id": "abcdefgh1"}]))
    assert "[/INST]I look.[TOOL_CALLS][{" in text


@settings(max_examples=20, deadline=None)
@given(histories())
def test_odd_history_is_encoded_without_loss(history: History) -> None:
    if any(message["role"] == "tool" and "tool_call_id" not in message for message in history.messages):
        return  # refused with the name of the field
    prompt = tekken().render(ChatRequest(history.messages, tools=history.tools))
    assert not history.lost(prompt)


def test_hints_on_a_model_without_them_change_no_prompt() -> None:
    assert tekken().facts.without_effect == {"reasoning_effort", "enable_thinking", "thinking"}
    found = tekken().encode_chat(
        ChatRequest([USER], template_kwargs={"reasoning_effort": "high", "enable_thinking": True, "thinking": False})
    )
    assert found == expected_ids([USER])


def test_pair_of_texts_is_refused_by_a_tokenizer_without_pairs() -> None:
    with raises_error(match="does not encode pairs of texts", kind=ErrorKind.INVALID_ARGUMENT):
        tekken().pack_pair("a", "b")
