"""Replaces the placeholders of media items in token ids by the tokens that stand for the items."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.base.errors import invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.types.media.facts import MediaFacts
from services.common.types.media.spans import MediaKind, MediaSpan
from services.preprocess.contract.tokenizer import MediaRules


@dataclass(frozen=True, slots=True)
class CountedItem:
    """A checked media item whose placeholder is to be expanded.

    Attributes:
        part: its content part, for errors.
        hash: of its file.
    """

    part: str
    hash: bytes
    facts: MediaFacts

    @property
    def kind(self) -> MediaKind:
        """Kind of the item."""
        return self.facts.kind


def expand(packed: bytes, rules: MediaRules, items: Sequence[CountedItem]) -> tuple[bytes, tuple[MediaSpan, ...]]:
    """Replaces the placeholders of packed ids by the tokens of the items, in their order.

    Returns:
        The packed ids, and a span for each item.

    Raises:
        SluiceError: INVALID_ARGUMENT if the model does not take an item, or the template wrote other placeholders.
    """
    ids = unpack_u32(packed)
    if not items:
        for kind, rule in rules.items():
            _check_count(ids.count(rule.token_id), (), kind, items)
        return packed, ()
    expected = {kind: [item for item in items if item.kind is kind] for kind in rules}
    for kind, rule in rules.items():
        _check_count(ids.count(rule.token_id), expected[kind], kind, items)
    expanded = array("I")
    spans = []
    start = 0
    for item in items:
        token_id = rules[item.kind].token_id
        try:
            at = ids.index(token_id, start)
        except ValueError:
            raise invalid(
                f"The chat template of the model writes the placeholder of {item.part} in another order; send the "
                "media items of each kind in messages of their own.",
                param=item.part,
                code="invalid_media",
            ) from None
        expanded += ids[start:at]
        ids_of_item = _ids(rules, item)
        length = len(ids_of_item)
        spans.append(MediaSpan(item.kind, item.hash, len(expanded), length, pack_u32([token_id]), length))
        expanded += ids_of_item
        start = at + 1
    expanded += ids[start:]
    return pack_u32(expanded), tuple(spans)


def look_up(rules: MediaRules, items: Sequence[CountedItem]) -> None:
    """Makes rules that wait for another process know the tokens of items; raises SluiceError as `expand`."""
    for item in items:
        if rules[item.kind].blocks:
            _ids(rules, item)


def _ids(rules: MediaRules, item: CountedItem) -> array[int]:
    try:
        return rules[item.kind].ids_of(item.facts)
    except ValueError as error:
        raise invalid(
            f"The {item.kind.capability} of {item.part} {error}.", param=item.part, code="invalid_media"
        ) from None


def _check_count(count: int, expected: Sequence[CountedItem], kind: MediaKind, items: Sequence[CountedItem]) -> None:
    """Raises SluiceError unless the template wrote a placeholder for each item of a kind."""
    if count == len(expected):
        return
    raise invalid(
        f"The chat template of the model writes {count} placeholders for {len(expected)} items of the kind "
        f"{kind.capability}; send such items only in messages whose role may have them.",
        param=(expected or items)[0].part if items else "messages",
        code="invalid_media",
    )
