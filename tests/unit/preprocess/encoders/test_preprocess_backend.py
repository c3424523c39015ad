from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.models import DEFAULT_SOURCE, resolve
from services.preprocess.encoders.backend import Backend, EncoderOptions, fastest
from services.preprocess.encoders.samples import SAMPLES
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.big_vocabulary import build_big_model
from tests.support.data.loaded_tokenizers import limits, tekken, tiny_folder, tiny_hf
from tests.support.data.tokenizer_families import EXACT

SLOW = EncoderOptions(fast_backend=False, cache_bytes=0)


class Letters(Backend):
    """Ids are code points, wrong for texts with `wrong` in them, and a panic for those with `deadly`."""

    def __init__(self, name: str, wrong: str = "\uffff", deadly: str = "\uffff") -> None:
        self.name = name
        self._wrong = wrong
        self._deadly = deadly

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        if any(self._deadly in text for text in texts):
            raise Panic
        return [(text.replace(self._wrong, "?")).encode("utf-32-le") for text in texts]


class Panic(BaseException):
    """What native code raises is no Exception."""


def test_a_faster_library_is_used_when_it_agrees() -> None:
    assert fastest(Letters("slow"), lambda: Letters("fast")).name == "fast"


def test_one_that_is_not_installed_is_done_without() -> None:
    def absent() -> Backend:
        raise ImportError

    assert fastest(Letters("slow"), absent).name == "slow"


@pytest.mark.parametrize("flaw", [{"wrong": "🤖"}, {"deadly": "🤖"}])
def test_one_that_differs_on_any_sample_is_not_used_and_said_so(
    flaw: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert fastest(Letters("slow"), lambda: Letters("fast", **flaw)).name == "fast"
    with caplog.at_level(logging.WARNING):
        assert fastest(Letters("slow"), lambda: Letters("fast", **flaw), ["x", "a 🤖 b"]).name == "slow"
    assert "returns different ids and is not used" in caplog.text


def test_one_that_cannot_read_the_files_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def unreadable() -> Backend:
        raise ValueError("no such model")

    with caplog.at_level(logging.INFO):
        assert fastest(Letters("slow"), unreadable).name == "slow"
    assert "cannot read these files" in caplog.text


def test_a_text_that_the_faster_library_fails_on_is_encoded_by_the_other() -> None:
    backend = fastest(Letters("slow"), lambda: Letters("fast", deadly="🤖"))
    assert backend.encode(["🤖", "a"]) == Letters("slow").encode(["🤖", "a"])


def test_samples_cover_what_tokenizers_differ_on() -> None:
    text = "".join(SAMPLES)
    for needed in ("<|im_start|>", "😀", "\u200d", "e\u0301", "你好", "\r\n", " " * 40, "\x00", "\t", "'ll", "123"):
        assert needed in text
    assert len(SAMPLES) > 300


def test_which_library_runs_is_known() -> None:
    assert tiny_hf().facts.backend == tekken().facts.backend == "fastokens"
    assert HfTokenizer(tiny_folder(), limits(), SLOW).facts.backend == "tokenizers"
    assert reference().facts.backend == "tiktoken"
    assert reference().facts.cache_refusal == HfTokenizer(tiny_folder(), limits(), SLOW).facts.cache_refusal != ""


def test_prompts_are_not_remembered_where_cuts_are_not_known_to_be_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = EXACT["llama"](tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"single_word": false', '"single_word": true'))
    with caplog.at_level(logging.INFO):
        tokenizer = HfTokenizer(folder, limits())
    assert tokenizer.cache_stats is None
    assert "word boundaries" in tokenizer.facts.cache_refusal
    assert "prompt segments are not cached" in caplog.text


@cache
def reference() -> MistralTokenizer:
    return MistralTokenizer(resolve(DEFAULT_SOURCE), SLOW)


@pytest.fixture(scope="module")
def big_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[HfTokenizer, HfTokenizer]:
    folder = build_big_model(tmp_path_factory.mktemp("big"))
    return HfTokenizer(folder, limits()), HfTokenizer(folder, limits(), SLOW)


@given(st.lists(st.text(max_size=60) | st.sampled_from(SAMPLES), min_size=1, max_size=4).map("".join))
@settings(max_examples=300, deadline=None)
def test_real_vocabularies_get_the_same_ids_from_every_library(
    big_pair: tuple[HfTokenizer, HfTokenizer], text: str
) -> None:
    fast, slow = big_pair
    assert (fast.facts.backend, slow.facts.backend) == ("fastokens", "tokenizers")
    assert fast.encode_text(text) == slow.encode_text(text)
    ours = tekken().encode_text(text, add_special_tokens=False)
    assert ours == reference().encode_text(text, add_special_tokens=False)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_added_around_a_text_is_the_librarys(name: str, tmp_path: Path) -> None:
    tokenizer = HfTokenizer(EXACT[name](tmp_path), limits())
    library = tokenizer._tokenizer
    for text in SAMPLES:
        for special in (True, False):
            assert tokenizer.encode_text(text, special) == library.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode_text(text) == tokenizer.encode_text(text, True)
