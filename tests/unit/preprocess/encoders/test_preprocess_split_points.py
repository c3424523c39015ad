from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.preprocess.encoders.split_points import cut_before, find_cut

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
