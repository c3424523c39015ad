"""Tokenizers of operators, written with `sluice.tokenizers` alone, of which only parts are implemented."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.packages.model_files import ModelSpec, fingerprint
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerProtocol
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.probes import prompt_fingerprint
from tests.support.data.loaded_tokenizers import limits, tiny_folder
from tests.support.oracles.errors import raises_error

MESSAGES = [{"role": "user", "content": "hi"}]
TOKENIZE = """
    def tokenize(self, messages, model, tools=None):
        self.calls = (model, tools)
        return list("".join(message["content"] for message in messages).encode())
"""
DECODE = """
    def decode(self, token_ids, skip_special_tokens=False):
        return bytes(token_ids).decode()
"""
METHODS = {"tokenize": TOKENIZE, "decode": DECODE}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Returns the name of a module for the class, which the test writes to `tmp_path`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"bytes_{abs(hash(request.node.name))}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def loaded(folder: Path, module: str, body: str, base: str = "(TokenizerProtocol)") -> TokenizerProtocol:
    code = (
        f"from sluice.tokenizers import TokenizerProtocol\n\n\nclass Bytes{base}:\n    def __init__(self, path): ...\n"
    )
    (folder / f"{module}.py").write_text(code + body)
    return load_tokenizer(ModelSpec("mine", str(tiny_folder()), f"{module}:Bytes"), limits())


@pytest.mark.parametrize("base", ["(TokenizerProtocol)", ""])
def test_tokenizer_with_two_methods_serves_every_call(tmp_path: Path, write: str, base: str) -> None:
    tokenizer = loaded(tmp_path, write, TOKENIZE + DECODE, base)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.encode_chat(ChatRequest(MESSAGES, tools)) == [104, 105]
    assert vars(tokenizer)["calls"] == ("mine", tools)
    assert tokenizer.render(ChatRequest(MESSAGES)) == "hi"
    assert tokenizer.pack_chat(ChatRequest(MESSAGES)) == b"h\0\0\0i\0\0\0"
    assert tokenizer.begin_chat(ChatRequest(MESSAGES)) is None
    assert (tokenizer.blocks, tokenizer.cache_stats, tokenizer.renders_apart) == (False, None, False)
    facts = tokenizer.facts
    assert (facts.fingerprint, facts.has_chat_template) == (fingerprint(tiny_folder()), True)
    assert facts.eos_ids
    assert facts.vocab_size > 255
    assert any(digest != "-" for digest in prompt_fingerprint(tokenizer).split(","))
    for encode in (tokenizer.encode_text, tokenizer.pack_text):
        with raises_error(match="encodes chats only", kind=ErrorKind.INVALID_ARGUMENT):
            encode("a")
    with raises_error(match="pairs of texts", kind=ErrorKind.INVALID_ARGUMENT):
        tokenizer.pack_pair("a", "b")
    tokenizer.close()


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        (ChatRequest(MESSAGES, chat_template="{{ 1 }}"), "chat_template"),
        (ChatRequest(MESSAGES, continue_final_message=True), "continue_final_message"),
        (ChatRequest(MESSAGES, add_generation_prompt=False), "add_generation_prompt"),
        (ChatRequest(MESSAGES, documents=[{"text": "a"}]), "documents"),
        (ChatRequest(MESSAGES, template_kwargs={"colour": "blue"}), "chat_template_kwargs"),
        (ChatRequest(MESSAGES, template_kwargs={"enable_thinking": True}, add_generation_prompt=True), None),
    ],
)
def test_plain_tokenizer_with_more_than_a_plain_chat_names_the_field(
    tmp_path: Path, write: str, chat: ChatRequest, param: str | None
) -> None:
    tokenizer = loaded(tmp_path, write, TOKENIZE + DECODE)
    if param is None:
        assert tokenizer.encode_chat(chat) == [104, 105]
        return
    with raises_error(param=param, kind=ErrorKind.INVALID_ARGUMENT):
        tokenizer.encode_chat(chat)


@pytest.mark.parametrize("base", ["(TokenizerProtocol)", ""])
@pytest.mark.parametrize("present", [names for n in (0, 1) for names in itertools.combinations(METHODS, n)])
def test_tokenizer_without_a_method_is_refused_in_one_sentence(
    tmp_path: Path, write: str, base: str, present: tuple[str, ...]
) -> None:
    body = "".join(METHODS[name] for name in present)
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION) as caught:
        loaded(tmp_path, write, body, base)
    message = caught.value.message
    lacking = " and ".join(name for name in METHODS if name not in present)
    assert message.startswith(f"The tokenizer {write}:Bytes lacks the method {lacking};")
    assert "\n" not in message


def test_tokenizer_with_an_async_method_is_refused(tmp_path: Path, write: str) -> None:
    with pytest.raises(SluiceError, match="has an async tokenize"):
        loaded(tmp_path, write, TOKENIZE.replace("def", "async def") + DECODE)


def test_tokenizer_that_is_a_function_is_refused(tmp_path: Path, write: str) -> None:
    (tmp_path / f"{write}.py").write_text("def load(path): ...\n")
    with pytest.raises(SluiceError, match="is not a class"):
        load_tokenizer(ModelSpec("mine", str(tiny_folder()), f"{write}:load"), limits())
