"""Images in chats of Mistral's models: the tokens are those of mistral-common's own encoder."""

from __future__ import annotations

import base64
from random import Random
from typing import Any

import numpy as np
import pytest
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers import image as mistral_image
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Reference

from services.common.base.packing import pack_u32, unpack_u32
from services.common.packages.model_files import DEFAULT_SOURCE, resolve
from services.common.types.media.facts import ImageFacts
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.tokenizers.mistral import MistralTokenizer
from tests.support.data.images import image_file

SIZES = [(1, 1), (16, 16), (17, 16), (100, 80), (1024, 1024), (1025, 700), (1600, 1200), (33, 3000)]
TEXT = {"type": "text", "text": "What is it? [IMG] [IMG_END]"}


@pytest.fixture(scope="module")
def tokenizer() -> MistralTokenizer:
    return MistralTokenizer(resolve(DEFAULT_SOURCE))


@pytest.mark.parametrize("order", ["image first", "text first", "two images", "two turns"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mistral_images_ids_equal_those_of_mistral_common(
    tokenizer: MistralTokenizer, size: tuple[int, int], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the pixels need OpenCV.
    monkeypatch.setattr(mistral_image, "transform_image", lambda image, size: np.zeros((3, *size)))
    sizes = [size] if order.endswith("first") else [size, (64, 48)]
    ours, theirs = chats(order, sizes)
    reference = Reference.from_file(str(resolve(DEFAULT_SOURCE)))
    expected = reference.encode_chat_completion(ChatCompletionRequest.from_openai(messages=theirs)).tokens
    items = [CountedItem("messages[0]", bytes(16), ImageFacts(*each, "PNG")) for each in sizes]
    assert MediaKind.IMAGE in tokenizer.media_rules
    packed, spans = expand(tokenizer.pack_chat(ChatRequest(ours)), tokenizer.media_rules, items)
    ids = unpack_u32(packed).tolist()
    assert ids == expected
    assert [ids[span.end - 1] for span in spans] == [13] * len(sizes)  # [IMG_END]
    assert [span.unexpanded_ids for span in spans] == [pack_u32([10])] * len(sizes)


def test_mistral_conversations_with_images_ids_equal_those_of_mistral_common(
    tokenizer: MistralTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 conversations of one to five turns with 1 to 4 images in any place and of any size."""
    monkeypatch.setattr(mistral_image, "transform_image", lambda image, size: np.zeros((3, *size)))
    reference, random = Reference.from_file(str(resolve(DEFAULT_SOURCE))), Random(18)
    rule, seen = tokenizer.media_rules[MediaKind.IMAGE], set()
    assert rule is not None
    for _ in range(200):
        ours, theirs, sizes = conversation(random)
        expected = reference.encode_chat_completion(ChatCompletionRequest.from_openai(messages=theirs)).tokens
        items = [CountedItem("messages[0]", bytes(16), ImageFacts(*size, "PNG")) for size in sizes]
        packed, spans = expand(tokenizer.pack_chat(ChatRequest(ours)), {MediaKind.IMAGE: rule}, items)
        assert unpack_u32(packed).tolist() == expected
        assert len(spans) == len(sizes)
        seen.add(tuple(expected))
    assert len(seen) == 200


def conversation(random: Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[int, int]]]:
    """Returns a conversation with references, the same with files for mistral-common, and the sizes of its images."""
    turns, sizes = random.randint(1, 5), list[tuple[int, int]]()
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    if random.random() < 0.5:
        ours.append({"role": "system", "content": sentence(random)})
        theirs.append(ours[-1])
    holders = [random.randrange(turns) for _ in range(random.randint(1, 4))]
    for turn in range(turns):
        texts = [{"type": "text", "text": sentence(random)} for _ in range(random.randint(1, 2))]
        our_parts, their_parts = list[dict[str, Any]](texts), list[dict[str, Any]](texts)
        for _ in range(holders.count(turn)):
            size, place = (random.randint(1, 900), random.randint(1, 900)), random.randint(0, len(our_parts))
            our_parts.insert(place, {"type": "image"})
            their_parts.insert(place, image_url(size))
            sizes.insert(len(sizes) - sum(part["type"] == "image" for part in our_parts[place + 1 :]), size)
        ours.append({"role": "user", "content": our_parts})
        theirs.append({"role": "user", "content": their_parts})
        if turn < turns - 1:
            ours.append({"role": "assistant", "content": sentence(random)})
            theirs.append(ours[-1])
    found = [part for message in ours if isinstance(message["content"], list) for part in message["content"]]
    for index, part in enumerate(part for part in found if part["type"] == "image"):
        part["media"] = index
    return ours, theirs, sizes


def sentence(random: Random) -> str:
    words = ["river", "Fluss", "川", "[IMG]", "[IMG_BREAK]", "\n", "42", "[INST]", "a", "🙂", "describe", "it."]
    return " ".join(random.choices(words, k=random.randint(1, 12)))


def image_url(size: tuple[int, int]) -> dict[str, Any]:
    encoded = base64.b64encode(image_file(*size)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def chats(order: str, sizes: list[tuple[int, int]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the same messages with references, and with files for mistral-common."""
    ours: list[dict[str, Any]] = [{"type": "image", "media": index} for index in range(len(sizes))]
    theirs = [image_url(size) for size in sizes]

    def messages(images: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if order == "two turns":
            return [
                {"role": "user", "content": [TEXT, images[0]]},
                {"role": "assistant", "content": "A cat."},
                {"role": "user", "content": [images[1], TEXT]},
            ]
        content = [TEXT, *images] if order == "text first" else [images[0], TEXT, *images[1:]]
        return [{"role": "user", "content": content}]

    return messages(ours), messages(theirs)
