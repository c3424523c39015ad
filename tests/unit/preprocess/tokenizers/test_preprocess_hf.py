from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.common.base.errors import ErrorKind, SluiceError
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.tokenizers.hf import HfTokenizer
from tests.support.data.loaded_tokenizers import limits, tiny_folder, tiny_hf
from tests.support.data.tiny_models import CONTEXT_LENGTH, build_tiny_model
from tests.support.oracles.errors import raises_error

USER = {"role": "user", "content": "What is the weather?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Grüße <b>"}}


def rewrite(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "model")


def load(folder: Path) -> HfTokenizer:
    return HfTokenizer(folder, limits())


def test_a_chat_is_rendered_by_the_models_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Sunny."}, USER]
    assert tiny_hf().render(ChatRequest(messages)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the weather?<|im_end|>\n"
        "<|im_start|>assistant\nSunny.<|im_end|>\n"
        "<|im_start|>user\nWhat is the weather?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_calls_and_results_reach_the_template() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}]
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    assert tiny_hf().render(ChatRequest(messages, tools=[TOOL])) == (
        "<|im_start|>system\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", "description": "Grüße <b>"}}\n'
        "</tools><|im_end|>\n"
        "<|im_start|>user\nWhat is the weather?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_arguments_and_generation_prompt_are_honoured() -> None:
    hf = tiny_hf()
    assert hf.render(ChatRequest([USER], template_kwargs={"enable_thinking": False})).endswith(
        "<think>\n\n</think>\n\n"
    )
    assert hf.render(ChatRequest([USER], add_generation_prompt=False)).endswith("weather?<|im_end|>\n")


def test_ids_are_those_of_the_rendered_text_and_nothing_is_added() -> None:
    hf, plain = tiny_hf(), Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    chat = ChatRequest([USER], tools=[TOOL])
    assert hf.encode_chat(chat) == plain.encode(hf.render(chat), add_special_tokens=False).ids
    assert hf.encode_chat(chat)[0] == plain.token_to_id("<|im_start|>")
    assert hf.tokenize([USER], "tiny", tools=[TOOL]) == hf.encode_chat(chat)


@pytest.mark.parametrize(
    ("final", "ending"),
    [
        ("Sure", "<|im_start|>assistant\nSure"),
        ("Sure,  ", "<|im_start|>assistant\nSure,  "),
        ("", "<|im_start|>assistant\n"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], "<|im_start|>assistant\na\nb "),
    ],
)
def test_the_final_message_is_left_open(final: Any, ending: str) -> None:
    chat = ChatRequest([USER, {"role": "assistant", "content": final}], continue_final_message=True)
    assert tiny_hf().render(chat).endswith(ending)


def test_a_template_that_trims_leaves_no_trailing_space_in_an_open_message(folder: Path) -> None:
    rewrite(
        folder, "tokenizer_config.json", chat_template="{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    )
    chat = ChatRequest([USER, {"role": "assistant", "content": " Sure,  "}], continue_final_message=True)
    assert load(folder).render(chat) == "<What is the weather?><Sure,"


def test_an_open_message_that_the_template_leaves_out_is_refused(folder: Path) -> None:
    rewrite(folder, "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    with raises_error(param="continue_final_message"):
        load(folder).render(ChatRequest([USER, {"role": "assistant", "content": "x"}], continue_final_message=True))


def test_a_clients_template_replaces_the_models() -> None:
    chat = ChatRequest([USER], chat_template="{{ eos_token }}{{ documents[0].t }}", documents=[{"t": "doc"}])
    assert tiny_hf().render(chat) == "<|im_end|>doc"


def test_named_templates_are_chosen_by_tools_and_by_name(folder: Path) -> None:
    named = [
        {"name": name, "template": f"{name} {{{{ tools | length if tools else 0 }}}}"} for name in ("default", "rag")
    ]
    rewrite(folder, "tokenizer_config.json", chat_template=[*named, {"name": "tool_use", "template": "with tools"}])
    hf = load(folder)
    assert hf.render(ChatRequest([USER])) == "default 0"
    assert hf.render(ChatRequest([USER], tools=[TOOL])) == "with tools"
    assert hf.render(ChatRequest([USER], tools=[TOOL], tool_choice="none")) == "default 0"
    assert hf.render(ChatRequest([USER], chat_template="rag")) == "rag 0"
    rewrite(folder, "tokenizer_config.json", chat_template=named[1:])
    with pytest.raises(SluiceError, match="set chat_template to one of rag"):
        load(folder).render(ChatRequest([USER]))


def test_additional_templates_are_chosen_by_the_names_of_their_files(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"{name} file")
    hf = load(folder)
    assert hf.render(ChatRequest([USER], chat_template="rag")) == "rag file"
    assert hf.render(ChatRequest([USER], tools=[TOOL])) == "tool_use file"
    assert hf.facts.template_fingerprint != tiny_hf().facts.template_fingerprint


def test_a_template_file_beats_the_configuration(folder: Path) -> None:
    before = load(folder).facts
    (folder / "chat_template.jinja").write_text("file")
    after = load(folder)
    assert after.render(ChatRequest([USER])) == "file"
    assert before.template_fingerprint != after.facts.template_fingerprint
    assert before.fingerprint != after.facts.fingerprint


def test_without_a_template_chats_are_refused_and_text_is_not(folder: Path) -> None:
    rewrite(folder, "tokenizer_config.json", chat_template=None)
    hf = load(folder)
    assert not hf.facts.has_chat_template
    assert hf.facts.template_fingerprint == ""
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="no_chat_template"):
        hf.encode_chat(ChatRequest([USER]))
    assert hf.encode_text("hello")
    assert hf.render(ChatRequest([USER], chat_template="{{ messages[0].role }}")) == "user"


def test_a_broken_template_of_the_model_fails_the_load(folder: Path) -> None:
    rewrite(folder, "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(SluiceError, match="syntax error in line 1"):
        load(folder)


def test_facts_come_from_the_models_files() -> None:
    plain = Tokenizer.from_file(str(tiny_folder() / "tokenizer.json"))
    facts = tiny_hf().facts
    assert facts.eos_ids == (plain.token_to_id("<|im_end|>"), plain.token_to_id("<|endoftext|>"))
    assert facts.context_length == CONTEXT_LENGTH
    assert facts.vocab_size == plain.get_vocab_size()
    assert facts.has_chat_template
    assert len(facts.template_fingerprint) == len(facts.fingerprint) == 64


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": 7}, {}, (2, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (2, 9)),
        ({"eos_token_id": [2, 2, 5]}, {"eos_token_id": 9}, (2, 5)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (2,)),
    ],
)
def test_eos_ids_from_all_files(
    folder: Path, generation: dict[str, Any], model: dict[str, Any], expected: tuple[int, ...]
) -> None:
    rewrite(folder, "generation_config.json", **generation)
    rewrite(folder, "config.json", **model)
    rewrite(folder, "tokenizer_config.json", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert load(folder).facts.eos_ids == expected


@pytest.mark.parametrize(
    ("model", "tokenizer", "expected"),
    [
        ({"max_position_embeddings": 8192}, {"model_max_length": 10**30}, 8192),
        ({"max_position_embeddings": 8192}, {"model_max_length": 100}, 100),
        ({"max_position_embeddings": None, "text_config": {"n_positions": 64}}, {"model_max_length": None}, 64),
        ({"max_position_embeddings": None}, {"model_max_length": None}, 0),
    ],
)
def test_context_length_from_all_files(
    folder: Path, model: dict[str, Any], tokenizer: dict[str, Any], expected: int
) -> None:
    rewrite(folder, "config.json", **model)
    rewrite(folder, "tokenizer_config.json", **tokenizer)
    assert load(folder).facts.context_length == expected


def test_ids_of_the_model_beyond_the_tokenizer_are_in_the_vocabulary(folder: Path) -> None:
    rewrite(folder, "config.json", vocab_size=2048)
    assert load(folder).facts.vocab_size == 2048


def test_settings_of_a_training_run_do_not_cut_or_pad_prompts(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(path))
    text = "hello world, this is more than four tokens"
    assert load(folder).encode_text(text) == tiny_hf().encode_text(text)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(SluiceError, match="send valid Unicode"):
        tiny_hf().encode_text("\ud800")
