from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.common.types.media.facts import ImageFacts
from services.common.types.media.spans import MediaKind, MediaSpan
from services.preprocess.media import engine_media
from services.preprocess.media.engine_media import read_prompt, with_files
from services.preprocess.media.expansion import CountedItem
from services.preprocess.media.samples import sample_png

ITEMS = [CountedItem(f"messages[0].content[{n}]", bytes([n]) * 16, ImageFacts(2, 2, "PNG")) for n in (0, 1)]
FILES = [b"a", b"bc"]
PAD = 9


def form(ids: list[int], unexpanded: list[int], *spans: list[int], kind: str = "image") -> dict[str, Any]:
    return {"ids": ids, "unexpanded_ids": unexpanded, "spans": [[kind, *span] for span in spans]}


def test_files_take_the_place_of_references_and_other_content_stays() -> None:
    plain = {"role": "user", "content": "text"}
    text = {"type": "text", "text": "a"}
    parts = [{"type": "image", "media": 1}, text, {"type": "image", "media": 0}]
    first, second = with_files([plain, {"role": "user", "content": parts}], ITEMS, FILES)
    assert first is plain
    assert second["content"] == [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()},
            "uuid": item.hash.hex(),
        }
        if item is not None
        else text
        for item, data in ((ITEMS[1], b"bc"), (None, b""), (ITEMS[0], b"a"))
    ]


def test_files_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_media, "MAX_BYTES", 2)
    with pytest.raises(SluiceError) as refused:
        with_files([{"role": "user", "content": []}], ITEMS, FILES)
    assert refused.value.kind is ErrorKind.TOO_LARGE


def test_spans_are_read_with_the_placeholder_that_the_engine_replaced() -> None:
    packed, spans = read_prompt(form([1, PAD, PAD, 2, 5, 6, 5, 3], [1, PAD, 2, PAD, 3], [1, 2], [4, 3]), ITEMS)
    assert packed == pack_u32([1, PAD, PAD, 2, 5, 6, 5, 3])
    single = pack_u32([PAD])
    assert spans == (
        MediaSpan(MediaKind.IMAGE, ITEMS[0].hash, 1, 2, single, 2),
        MediaSpan(MediaKind.IMAGE, ITEMS[1].hash, 4, 3, single, 3),
    )


@pytest.mark.parametrize(
    "prompt",
    [
        form([1, PAD, PAD, 2], [1, PAD, 2], [1, 2]),  # one image is missing
        form([1, PAD, PAD, 2], [1, 2], [1, 1], [2, 1]),  # no placeholders
        form([1, PAD, PAD, 2], [1, PAD, PAD, 3], [1, 1], [2, 1]),  # other text
        form([1, PAD, PAD, 2], [1, PAD, PAD, 2], [2, 1], [1, 1]),  # out of order
        form([1, PAD, PAD], [], [1, 1], [2, 1]),
        form([PAD, 4, PAD, 5], [PAD, 4, PAD, 5], [0, 1], [2, 1], kind="video"),
    ],
)
def test_prompt_without_one_placeholder_for_each_image_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(SluiceError, match="one placeholder for each media item") as refused:
        read_prompt(prompt, ITEMS)
    assert refused.value.code == "invalid_media"


def test_placeholder_in_the_text_is_refused() -> None:
    with pytest.raises(SluiceError, match="placeholder of an image in its text") as refused:
        read_prompt(form([PAD, 4, PAD, 5], [PAD, 4, PAD, 5], [0, 1]), ITEMS[:1])
    assert refused.value.param == "messages"
    with pytest.raises(SluiceError, match="placeholder of an image in its text"):
        read_prompt(form([PAD, PAD, 4, PAD], [PAD, 4, PAD], [0, 2]), ITEMS[:1])


@pytest.mark.parametrize("size", [(1, 1), (200, 100)])
def test_sample_png_is_an_image_of_its_size(size: tuple[int, int]) -> None:
    image = Image.open(io.BytesIO(sample_png(*size)))
    image.load()
    assert (image.size, image.mode, image.format) == (size, "RGB", "PNG")
