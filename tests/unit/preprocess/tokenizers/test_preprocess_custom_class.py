"""The class that the documentation gives as an example is loaded and used as it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from services.common.errors import SluiceError
from services.common.models import ModelSpec
from services.preprocess.protocol import ChatRequest, TokenizerProtocol
from services.preprocess.tokenizers.loading import load_tokenizer
from tests.support.data.loaded_tokenizers import limits, tiny_folder
from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "preprocessing.md"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizerProtocol:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    (tmp_path / "byte_tokenizer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "byte_tokenizer", raising=False)
    return load_tokenizer(ModelSpec("mine", str(tiny_folder()), "byte_tokenizer:ByteTokenizer"), limits())


def test_it_makes_prompts_and_text(own: TokenizerProtocol) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    ids = own.encode_chat(ChatRequest(messages))
    assert ids == [256, *"user\nGrüße".encode(), 257, 256, *b"assistant\n"]
    assert own.tokenize(messages, "mine") == ids
    assert own.render(ChatRequest(messages)) == "<turn>user\nGrüße</turn><turn>assistant\n"
    assert own.decode(ids, skip_special_tokens=True) == "user\nGrüßeassistant\n"
    assert own.encode_text("ü") == [195, 188]
    assert max(ids) < own.facts.vocab_size


def test_its_refusals_name_the_field(own: TokenizerProtocol) -> None:
    with pytest.raises(SluiceError) as caught:
        own.encode_chat(ChatRequest([{"role": "user", "content": []}]))
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize("name", ["no_such_module:Class", "byte_tokenizer:NoSuchClass"])
def test_a_class_that_is_not_there_is_a_typed_error(own: TokenizerProtocol, name: str) -> None:
    with pytest.raises(SluiceError, match=r"The tokenizer of model mine cannot be loaded"):
        load_tokenizer(ModelSpec("mine", str(tiny_folder()), name), limits())
