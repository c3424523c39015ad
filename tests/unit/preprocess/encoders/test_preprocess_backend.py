from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from services.preprocess.encoders.backend import Backend, EncoderOptions, fastest
from services.preprocess.encoders.samples import SAMPLES
from services.preprocess.encoders.split_points import cut_before, find_cut
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
def test_backend_that_differs_on_a_sample_is_not_used_and_logged(
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


TOKEN = "<|t|>"
ALPHABET = ("a", "b", " ", "  ", "\n", "é", "e\u0301", "<", "|", "t", ">", "<|t", "t|>", TOKEN, "<x>", "<|t|><|t|>")


def added(content: str = TOKEN, **flags: Any) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **usual, **flags}


def pipeline(*tokens: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {"added_tokens": list(tokens) or [added()], "model": {"type": "BPE"}, **parts}


def test_the_first_candidate_that_is_exact_is_taken() -> None:
    tokenizer = pipeline(added("<a>", lstrip=True), added("<b>"), added("<c>"))
    assert find_cut(tokenizer, ["none", "<a>", "<b>", "<c>"]).token == "<b>"
    assert find_cut(tokenizer, ["<c>", "<b>"]).token == "<c>"


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (pipeline(added(normalized=True)), "matched in normalized text"),
        (pipeline(added(lstrip=True)), "strips whitespace on its left"),
        (pipeline(added(single_word=True)), "word boundaries"),
        (pipeline(added(), added("<w>", single_word=True)), "word boundaries"),
        (pipeline(added(), added("<|t|>x")), "overlaps with"),
        (pipeline(added(), added("t|")), "overlaps with"),
        (pipeline(added(), added("x<|")), "overlaps with"),
        (pipeline(added(), added(">y")), "overlaps with"),
        (pipeline(added("aba")), "no added token"),
        (pipeline(model={"type": "Neural"}), "model type Neural is not supported"),
        (pipeline(model={"type": "BPE", "dropout": 0.1}), "at random"),
        (pipeline(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Magic"}]}), "Magic"),
        (pipeline(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Magic"}]}), "Magic"),
        ({}, "no added token"),
    ],
)
def test_what_is_not_known_to_be_exact_is_refused_with_a_reason(tokenizer: dict[str, Any], reason: str) -> None:
    cut = find_cut(tokenizer, [TOKEN])
    assert cut.token == ""
    assert reason in cut.refusal


@pytest.mark.parametrize(("token", "reason"), [("aba", "overlaps with aba"), (" x", "whitespace"), ("x\n", "white")])
def test_tokens_that_cannot_be_cut_at_for_themselves(token: str, reason: str) -> None:
    assert reason in find_cut(pipeline(added(token)), [token]).refusal


@given(st.lists(st.sampled_from(ALPHABET)).map("".join))
def test_the_parts_are_the_text_and_each_begins_with_the_token(text: str) -> None:
    parts = cut_before(text, TOKEN)
    assert "".join(parts) == text
    assert all(part.startswith(TOKEN) and part.count(TOKEN) == 1 for part in parts[1:])
    assert TOKEN not in parts[0][1:] if parts else not text


NORMALIZERS = {
    "none": None,
    "prepend": normalizers.Prepend("_"),
    "nfc": normalizers.NFC(),
    "strip": normalizers.Strip(),
    "replace": normalizers.Sequence([normalizers.Replace(" ", "_"), normalizers.Prepend("_")]),
}
PRE_TOKENIZERS = {
    "none": None,
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "first": pre_tokenizers.Metaspace("_", prepend_scheme="first"),
    "always": pre_tokenizers.Metaspace("_", prepend_scheme="always"),
    "spaces": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]),
}
OTHERS = {
    "plain": AddedToken("<x>", normalized=False),
    "greedy": AddedToken("<x>", lstrip=True, rstrip=True, normalized=False),
    "normalized": AddedToken("b", normalized=True),
    "space": AddedToken("  ", normalized=False),
}


def made(normalizer: str, pre_tokenizer: str, other: str, rstrip: bool) -> Tokenizer:
    letters = [*"abteét<>|_ \n\u0301", "ab", "aa", "_a", "_b", "__", "_", *pre_tokenizers.ByteLevel.alphabet()]
    vocabulary = {letter: index for index, letter in enumerate(dict.fromkeys(letters))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("a", "a"), ("_", "a"), ("_", "b"), ("_", "_")]))
    if NORMALIZERS[normalizer] is not None:
        tokenizer.normalizer = NORMALIZERS[normalizer]
    if PRE_TOKENIZERS[pre_tokenizer] is not None:
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]
    tokenizer.add_special_tokens([AddedToken(TOKEN, normalized=False, rstrip=rstrip)])
    tokenizer.add_tokens([OTHERS[other]])
    return tokenizer


@given(
    st.sampled_from(list(NORMALIZERS)),
    st.sampled_from(list(PRE_TOKENIZERS)),
    st.sampled_from(list(OTHERS)),
    st.booleans(),
    st.lists(st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join), min_size=1, max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_where_a_cut_is_allowed_the_parts_have_the_ids_of_the_whole(
    normalizer: str, pre_tokenizer: str, other: str, rstrip: bool, texts: list[str]
) -> None:
    tokenizer = made(normalizer, pre_tokenizer, other, rstrip)
    cut = find_cut(json.loads(tokenizer.to_str()), [TOKEN])
    assert cut.token == TOKEN
    for text in texts:
        parts = [tokenizer.encode(part, add_special_tokens=False).ids for part in cut_before(text, TOKEN)]
        assert [token for part in parts for token in part] == tokenizer.encode(text, add_special_tokens=False).ids
