"""Images in the messages of vLLM's gRPC server."""

from __future__ import annotations

import base64
import io
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from services.common.base.errors import ErrorKind
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import GenerateRequest, MediaItem
from services.worker.engines.inprocess.sampling import Facts
from services.worker.engines.shared.media_prompts import placeholder_of
from services.worker.engines.vllm.handoff import Handoff
from services.worker.engines.vllm_grpc import card, media, wire
from services.worker.engines.vllm_grpc.response_reader import ResponseReader
from tests.support.oracles.errors import raises_error

FACTS = Facts(context_length=100)
PLACEHOLDER = 9


def item(offset: int, length: int, *short: int, kind: MediaKind = MediaKind.IMAGE) -> MediaItem:
    span = MediaSpan(kind, bytes(16), offset, length, array("I", short).tobytes())
    return MediaItem(span, MediaFile(bytes(16), b"file %d" % offset))


def request(tokens: list[int], *items: MediaItem, **fields: Any) -> GenerateRequest:
    return GenerateRequest("r", "m", array("I", tokens), media=items, **fields)


TWO = request([1, 9, 9, 9, 2, 9, 9, 3], item(1, 3, 9), item(5, 2, 9))


def test_request_with_images_carries_one_placeholder_and_one_data_url_each() -> None:
    message = wire.write_request(TWO, FACTS, None, PLACEHOLDER)
    assert list(message.tokenized.input_ids) == [1, 9, 2, 9, 3]
    assert [ref.modality for ref in message.media_refs.items] == [common_pb2.IMAGE] * 2
    files = [base64.b64decode(ref.url.partition(",")[2]) for ref in message.media_refs.items]
    assert files == [b"file 1", b"file 5"]


def test_request_without_images_has_no_media_refs() -> None:
    assert not wire.write_request(request([1, 2]), FACTS, None, PLACEHOLDER).HasField("media_refs")


@pytest.mark.parametrize(
    "asked",
    [
        request([1, 9, 9, 2, 9], item(1, 2, 9)),
        request([1, 9, 9, 2], item(1, 2)),
        request([1, 9, 9, 2], item(1, 2, 9, 9)),
        request([1, 9, 9, 2], item(1, 2, 7)),
        request([1, 9, 9, 2], item(1, 2, 9, kind=MediaKind.AUDIO)),
    ],
    ids=["surplus placeholder", "nothing unexpanded", "two placeholders", "another token", "audio"],
)
def test_request_whose_placeholders_are_not_its_images_is_refused(asked: GenerateRequest) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        wire.write_request(asked, FACTS, None, PLACEHOLDER)


def test_request_with_images_is_refused_by_servers_without_and_by_decode_workers() -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        wire.write_request(TWO, FACTS, None)
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        wire.write_request(TWO, FACTS, Handoff(4, {}), PLACEHOLDER)


def test_placeholder_tokens_that_the_model_generated_are_kept() -> None:
    moved = request([1, 9, 9, 2, 9], item(1, 2, 9), resumed_tokens=1)
    assert list(wire.write_request(moved, FACTS, None, PLACEHOLDER).tokenized.input_ids) == [1, 9, 2, 9]


def test_answer_to_another_expansion_is_an_error() -> None:
    def answer(count: int) -> pb.GenerateResponse:
        return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[5], prompt_tokens=count))

    delta = ResponseReader(TWO).take(answer(8))
    assert delta is not None
    assert list(delta.token_ids) == [5]
    with raises_error(kind=ErrorKind.INTERNAL):
        ResponseReader(TWO).take(answer(7))
    assert ResponseReader(replace(TWO, media=())).take(answer(7)) is not None


def test_images_are_offered_by_servers_with_a_processor_of_data_urls_and_no_connector() -> None:
    server = pb.GetServerInfoResponse(mm_processor="inprocess", mm_media_ref_schemes="http,https,data")
    assert media.is_offered(server)
    assert not media.is_offered(pb.GetServerInfoResponse())
    assert not media.is_offered(pb.GetServerInfoResponse(mm_processor="inprocess", mm_media_ref_schemes="http"))
    server.kv_connector = "NixlConnector"
    assert not media.is_offered(server)


def test_capability_image_is_only_on_the_card_of_a_server_that_processed_one() -> None:
    model, server = pb.GetModelInfoResponse(is_generation=True), pb.GetServerInfoResponse()
    flags = {"has_events": True, "profiles": False}
    assert Capability.IMAGE not in card.capabilities(model, server, **flags)
    assert Capability.IMAGE in card.capabilities(model, server, **flags, takes_images=True)


@pytest.mark.parametrize("name", ["image_token_id", "image_token_index"])
def test_placeholder_is_read_from_the_models_configuration(name: str, tmp_path: Path) -> None:
    assert placeholder_of(media.model_config(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5, name: 4}))
    assert placeholder_of(media.model_config(tmp_path)) == 4
    (tmp_path / "config.json").write_text("[]")
    assert placeholder_of(media.model_config(tmp_path)) is None


def test_probe_has_a_picture_that_decodes() -> None:
    asked = media.probe(PLACEHOLDER)
    (one,) = asked.media
    with Image.open(io.BytesIO(one.file.data)) as picture:
        picture.load()
        assert (picture.size, picture.mode, picture.getpixel((5, 5))) == ((64, 64), "RGB", (255, 255, 255))
    assert list(wire.write_request(asked, FACTS, None, PLACEHOLDER).tokenized.input_ids) == [PLACEHOLDER, 0]
