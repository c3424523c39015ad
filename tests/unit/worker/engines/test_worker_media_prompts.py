"""Prompts with media items as engines that expand them take them."""

from __future__ import annotations

from array import array

import pytest

from services.common.base.errors import ErrorKind
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan
from services.worker.contract.generation import MediaItem
from services.worker.engines.shared.media_prompts import check_expansion, unexpanded
from tests.support.oracles.errors import raises_error


def item(offset: int, length: int, *short: int) -> MediaItem:
    span = MediaSpan(MediaKind.IMAGE, bytes(16), offset, length, array("I", short).tobytes())
    return MediaItem(span, MediaFile(bytes(16), b"file"))


def test_unexpanded_with_two_items_replaces_each_span_by_its_own_ids() -> None:
    prompt = array("I", [1, 9, 9, 9, 2, 8, 8, 3])
    assert unexpanded(prompt, [item(1, 3, 9), item(5, 2, 7, 8)]) == [1, 9, 2, 7, 8, 3]


def test_unexpanded_without_unexpanded_ids_keeps_the_tokens() -> None:
    assert unexpanded(array("I", [1, 9, 9, 2]), [item(1, 2)]) == [1, 9, 9, 2]


def test_unexpanded_keeps_the_tokens_of_an_adjacent_and_of_a_last_item() -> None:
    assert unexpanded(array("I", [9, 9, 8, 8]), [item(0, 2, 9), item(2, 2, 8)]) == [9, 8]


@pytest.mark.parametrize(
    "media", [[item(1, 3, 9), item(3, 1, 9)], [item(3, 1, 9), item(1, 1, 9)], [item(3, 2, 9)], [item(1, 0, 9)]]
)
def test_unexpanded_with_spans_that_do_not_fit_raises(media: list[MediaItem]) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        unexpanded(array("I", [1, 9, 9, 9]), media)


def test_unexpanded_with_a_placeholder_outside_the_items_raises() -> None:
    prompt = array("I", [1, 9, 9, 2, 9])
    assert unexpanded(prompt[:4], [item(1, 2, 9)], (7, 9)) == [1, 9, 2]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media"):
        unexpanded(prompt, [item(1, 2, 9)], (7, 9))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media"):
        unexpanded(array("I", [7, 9, 9]), [item(1, 2, 9)], (9, 7))


def test_check_expansion_of_other_tokens_raises() -> None:
    check_expansion(array("I", [1, 9, 9]), [1, 9, 9])
    with raises_error(kind=ErrorKind.INTERNAL):
        check_expansion(array("I", [1, 9, 9]), [1, 9])


def test_unexpanded_with_generated_placeholders_keeps_them() -> None:
    prompt = array("I", [1, 9, 9, 2, 9, 3])
    assert unexpanded(prompt, [item(1, 2, 9)], (7, 9), generated=2) == [1, 9, 2, 9, 3]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media"):
        unexpanded(prompt, [item(1, 2, 9)], (7, 9), generated=1)
