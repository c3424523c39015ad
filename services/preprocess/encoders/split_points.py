"""Where a rendered prompt may be cut so that the parts' ids, put together, are the whole's.

A `tokenizers` pipeline first splits the raw text at added tokens that are not normalized; normalizer, pre-tokenizer and
model then see each piece by itself. So a text may be cut right before every occurrence of such a token T, provided that

* T is always found: no other added token contains it, begins with its end or ends with its beginning, and neither does
  T itself, so that the leftmost-longest search cannot step over an occurrence;
* nothing at the cut looks across it: T takes no white space from its left, neither it nor a neighbour asks for word
  boundaries, and it neither begins nor ends with white space that a neighbour could take;
* every later step works on one piece at a time. Those that treat the text's first piece in a special way still agree,
  because a part that begins with T has nothing but T at its first place.

What is not known to keep these rules is refused, with a sentence that says why.
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
    """The token to cut before, or why there is none."""

    token: str = ""
    refusal: str = ""


def find_cut(tokenizer: dict[str, Any], candidates: Iterable[str]) -> SplitPoint:
    """The first candidate that cuts are exact at.

    Args:
        tokenizer: content of a tokenizer.json.
        candidates: texts of tokens, the best first; those that are no added tokens are passed over.
    """
    if refusal := _looks_across_pieces(tokenizer):
        return SplitPoint(refusal=refusal)
    added = [entry for entry in tokenizer.get("added_tokens") or [] if entry.get("content")]
    if any(entry.get("single_word") for entry in added):
        return SplitPoint(refusal="an added token asks for word boundaries")
    by_text = {entry["content"]: entry for entry in added}
    reason = "the chat template writes no token of the vocabulary"
    for text in candidates:
        entry = by_text.get(text)
        if entry is None:
            continue
        reason = _not_exact(entry, by_text)
        if not reason:
            return SplitPoint(text)
    return SplitPoint(refusal=reason)


def cut_before(text: str, token: str) -> list[str]:
    """The parts of a text, every one but the first beginning with the token; together they are the text."""
    first, *rest = text.split(token)
    parts = [token + part for part in rest]
    return [first, *parts] if first else parts


def _looks_across_pieces(tokenizer: dict[str, Any]) -> str:
    model = tokenizer.get("model") or {}
    # Older files leave the type out where the content tells it.
    if (model.get("type") or "BPE") not in _MODELS:
        return f"the model {model.get('type')} is not known"
    if model.get("dropout"):
        return "the model drops merges at random"
    for name, known in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _PRE_TOKENIZERS)):
        for step in _steps(tokenizer.get(name)):
            if step not in known:
                return f"the {name} {step} is not known"
    return ""


def _steps(component: Any) -> Iterable[str]:
    if component is None:
        return
    if component.get("type") == "Sequence":
        for inner in component.get("normalizers") or component.get("pretokenizers") or ():
            yield from _steps(inner)
    else:
        yield str(component.get("type"))


def _not_exact(entry: dict[str, Any], added: Iterable[str]) -> str:
    token: str = entry["content"]
    if entry.get("normalized"):
        return f"{token} is looked for in normalized text"
    if entry.get("lstrip"):
        return f"{token} takes white space from its left"
    if token != token.strip():
        return f"{token!r} begins or ends with white space"
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
