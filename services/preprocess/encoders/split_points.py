"""Finds tokens before which a rendered prompt can be split such that the parts' ids concatenate to those of the prompt.

A `tokenizers` pipeline first splits the raw text at added tokens that are not normalized; normalizer, pre-tokenizer and
model then process each piece by itself. So a text may be split right before every occurrence of such a token T if

* T is always found: no other added token contains it, begins with its end or ends with its beginning, and neither does
  T itself, so that the leftmost-longest search cannot skip an occurrence;
* nothing at the split depends on the other side: T does not strip whitespace on its left, neither it nor a neighbour
  requires word boundaries, and it neither begins nor ends with whitespace that a neighbour could strip;
* every later step processes one piece at a time. Steps that treat the text's first piece specially still agree, because
  a part that begins with T has only T as its first piece.

Tokenizers not known to satisfy these rules are rejected with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

_NORMALIZERS = frozenset(
    [
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Strip",
        "StripAccents",
    ]
)
_PRE_TOKENIZERS = frozenset(
    [
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    ]
)
_MODELS = frozenset(("BPE", "Unigram", "WordLevel", "WordPiece"))


class SplitPoint(NamedTuple):
    """The token to split before, or the reason why there is none."""

    token: str = ""
    refusal: str = ""


def find_cut(tokenizer: dict[str, Any], candidates: Iterable[str]) -> SplitPoint:
    """Returns the first candidate at which splitting is exact.

    Args:
        tokenizer: content of a tokenizer.json.
        candidates: token strings, the best first; those that are not added tokens are skipped.
    """
    if refusal := _unsupported_step(tokenizer):
        return SplitPoint(refusal=refusal)
    added = [entry for entry in tokenizer.get("added_tokens") or [] if entry.get("content")]
    if any(entry.get("single_word") for entry in added):
        return SplitPoint(refusal="an added token requires word boundaries")
    by_text = {entry["content"]: entry for entry in added}
    reason = "the chat template emits no added token"
    for text in candidates:
        entry = by_text.get(text)
        if entry is None:
            continue
        reason = _inexact_reason(entry, by_text)
        if not reason:
            return SplitPoint(text)
    return SplitPoint(refusal=reason)


def cut_before(text: str, token: str) -> list[str]:
    """Returns the parts of a text, each but the first starting with the token."""
    first, *rest = text.split(token)
    parts = [token + part for part in rest]
    return [first, *parts] if first else parts


def _unsupported_step(tokenizer: dict[str, Any]) -> str:
    model = tokenizer.get("model") or {}
    # Older files omit the type when the content implies it.
    if (model.get("type") or "BPE") not in _MODELS:
        return f"the model type {model.get('type')} is not supported"
    if model.get("dropout"):
        return "the model drops merges at random"
    for name, supported in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _PRE_TOKENIZERS)):
        for step in _steps(tokenizer.get(name)):
            if step not in supported:
                return f"the {name} {step} is not supported"
    return ""


def _steps(component: Any) -> Iterable[str]:
    if component is None:
        return
    if component.get("type") == "Sequence":
        for inner in component.get("normalizers") or component.get("pretokenizers") or ():
            yield from _steps(inner)
    else:
        yield str(component.get("type"))


def _inexact_reason(entry: dict[str, Any], added: Iterable[str]) -> str:
    token: str = entry["content"]
    if entry.get("normalized"):
        return f"{token} is matched in normalized text"
    if entry.get("lstrip"):
        return f"{token} strips whitespace on its left"
    if token != token.strip():
        return f"{token!r} begins or ends with whitespace"
    for other in added:
        if _overlap(token, other):
            return f"{token} overlaps with {other}"
    return ""


def _overlap(token: str, other: str) -> bool:
    """Whether an occurrence of `other` can share characters with one of `token` without being the same."""
    if token == other:
        return any(token.endswith(token[:size]) for size in range(1, len(token)))
    if token in other or other in token:
        return True
    return any(
        other.endswith(token[:size]) or token.endswith(other[:size]) for size in range(1, min(len(token), len(other)))
    )
