"""Images in requests to SGLang, without SGLang."""

from __future__ import annotations

import base64
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import GenerateRequest, MediaItem
from services.worker.engines.sglang import card
from services.worker.engines.shared.sglang_request_state import RequestState
from services.worker.engines.shared.sglang_sampling import Facts, engine_request
from tests.support.fakes.engines import RecordingSink
from tests.support.oracles.errors import raises_error

FACTS = Facts(context_length=100, placeholder=9)


def item(offset: int, length: int, *short: int) -> MediaItem:
    span = MediaSpan(MediaKind.IMAGE, bytes(16), offset, length, array("I", short).tobytes())
    return MediaItem(span, MediaFile(bytes(16), b"file %d" % offset))


TWO = GenerateRequest("r", "m", array("I", [1, 9, 9, 9, 2, 9, 9, 3]), media=(item(1, 3, 9), item(5, 2, 9)))


def engine(processor: object, mode: str = "null", **config: int) -> Any:
    values: dict[str, Any] = {"disaggregation_mode": mode, "dp_size": 1}
    model = SimpleNamespace(hf_config=SimpleNamespace(**config))
    manager = SimpleNamespace(
        is_generation=True, mm_processor=processor, model_config=model, config_value=lambda name: values.get(name)
    )
    return SimpleNamespace(tokenizer_manager=manager)


def test_request_with_images_has_one_placeholder_and_one_data_url_each() -> None:
    fields = engine_request(TWO, "rid", FACTS)
    assert fields["input_ids"] == [1, 9, 2, 9, 3]
    files = [base64.b64decode(url.partition(",")[2]) for url in fields["image_data"]]
    assert files == [b"file 1", b"file 5"]
    assert "image_data" not in engine_request(GenerateRequest("r", "m", array("I", [1, 2])), "rid", FACTS)


@pytest.mark.parametrize(
    "asked",
    [
        GenerateRequest("r", "m", array("I", [1, 9, 9, 2, 9]), media=(item(1, 2, 9),)),
        GenerateRequest("r", "m", array("I", [1, 9, 9, 2]), media=(item(1, 2),)),
        GenerateRequest("r", "m", array("I", [1, 2, 3]), media=(item(1, 1, 2),)),
    ],
    ids=["fewer images than placeholders", "expanded ids", "more images than placeholders"],
)
def test_request_whose_placeholders_are_not_its_images_is_refused(asked: GenerateRequest) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        engine_request(asked, "rid", FACTS)


def test_request_with_images_for_a_model_without_is_refused() -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        engine_request(TWO, "rid", Facts(context_length=100))


def test_answer_to_another_expansion_is_an_error() -> None:
    def take(prompt_tokens: int) -> None:
        meta = {"completion_tokens": 1, "finish_reason": None, "prompt_tokens": prompt_tokens}
        RequestState(TWO, "rid", RecordingSink()).take({"output_ids": [5], "meta_info": meta})

    take(8)
    with raises_error(kind=ErrorKind.INTERNAL):
        take(7)


def test_capability_image_needs_a_processor_a_placeholder_and_an_aggregated_worker() -> None:
    processor = object()
    assert Capability.IMAGE in card.capabilities(engine(processor, image_token_id=9))
    assert Capability.IMAGE in card.capabilities(engine(processor, image_token_index=9))
    assert Capability.IMAGE not in card.capabilities(engine(None, image_token_id=9))
    assert Capability.IMAGE not in card.capabilities(engine(processor))
    assert Capability.IMAGE not in card.capabilities(engine(processor, "decode", image_token_id=9))
