"""Prompts with media items for vLLM, with stand-ins for the parts of vLLM that read and process files."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from services.common.base.errors import ErrorKind
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.worker.contract.capabilities import MEDIA, Capability
from services.worker.contract.generation import MediaItem
from services.worker.engines.vllm import card, library, media
from services.worker.engines.vllm.media import MediaPrompts
from services.worker.engines.vllm.media_files import DECODED_BYTES, DecodedBudget, Reader, _bounded
from tests.support.oracles.errors import raises_error

PICTURE, SOUND, FILM = 7, 8, 9
IMAGE, AUDIO, VIDEO = MediaKind.IMAGE, MediaKind.AUDIO, MediaKind.VIDEO


class FakeRenderer:
    """Puts two placeholders for the first one of each item, and leaves surplus ones as they are, as vLLM does."""

    default_cmpl_tok_params = None

    def __init__(self, limits: Mapping[str, int] | None) -> None:
        self.prompts: list[dict[str, Any]] = []
        processor = SimpleNamespace(image_token_id=PICTURE)
        info = SimpleNamespace(allowed_mm_limits=limits, get_hf_processor=lambda: processor)
        self.mm_processor = None if limits is None else SimpleNamespace(info=info)

    async def render_cmpl_async(self, prompts: Sequence[dict[str, Any]], params: object) -> list[dict[str, Any]]:
        (prompt,) = prompts
        self.prompts.append(prompt)
        ids: list[int] = list(prompt["prompt_token_ids"])
        for kind, token in (("image", PICTURE), ("audio", SOUND), ("video", FILM)):
            at = 0
            for _ in prompt["multi_modal_data"].get(kind, ()):
                at = ids.index(token, at) + 2
                ids.insert(at - 1, token)
        return [{"prompt_token_ids": ids}]


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> FakeRenderer:
    module = ModuleType("vllm.renderers.inputs.preprocess")
    module.parse_model_prompt = lambda config, raw: raw  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.renderers", "vllm.renderers.inputs"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return FakeRenderer({"image": 1, "audio": 2, "video": 3})


def prompts_of(renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch) -> MediaPrompts:
    def load(data: bytes, budget: DecodedBudget) -> str:
        budget.take(len(data))
        if data == b"broken":
            raise OSError("no header.")
        return data.decode()

    kinds = dict.fromkeys((IMAGE, AUDIO, VIDEO), Reader({}, isolated=False))
    monkeypatch.setattr(media, "readers_of", lambda config, info: kinds)
    monkeypatch.setattr(media, "load_of", lambda kind, options: load)
    config = SimpleNamespace(audio_token_index=SOUND, video_token_id=FILM, image_token_id=None)
    return MediaPrompts(SimpleNamespace(renderer=renderer, model_config=SimpleNamespace(hf_config=config)))


def item(kind: MediaKind, offset: int, data: bytes, token: int, length: int = 2) -> MediaItem:
    digest = content_hash(data)
    return MediaItem(MediaSpan(kind, digest, offset, length, array("I", [token]).tobytes()), MediaFile(digest, data))


async def test_prompt_with_items_of_every_kind_lists_files_and_hashes_by_kind_in_order(
    renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [item(VIDEO, 1, b"a", FILM), item(IMAGE, 3, b"b", PICTURE), item(VIDEO, 6, b"c", FILM)]
    ids = array("I", [1, FILM, FILM, PICTURE, PICTURE, 2, FILM, FILM])
    prompt = await prompts_of(renderer, monkeypatch).prompt(ids, items, "salt", 0)
    assert prompt["prompt_token_ids"] == ids.tolist()
    assert renderer.prompts == [
        {
            "prompt_token_ids": [1, FILM, PICTURE, 2, FILM],
            "multi_modal_data": {"video": ["a", "c"], "image": ["b"]},
            "multi_modal_uuids": {
                "video": [content_hash(b"a").hex(), content_hash(b"c").hex()],
                "image": [content_hash(b"b").hex()],
            },
            "cache_salt": "salt",
        }
    ]


@pytest.mark.parametrize("stray", [PICTURE, SOUND, FILM])
async def test_prompt_with_a_stray_placeholder_of_any_kind_is_refused_unless_it_was_generated(
    stray: int, renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(renderer, monkeypatch)
    ids, items = array("I", [SOUND, SOUND, 1, stray]), [item(AUDIO, 0, b"a", SOUND)]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media"):
        await prompts.prompt(ids, items, "", 0)
    assert not renderer.prompts
    assert (await prompts.prompt(ids, items, "", 1))["prompt_token_ids"] == ids.tolist()


async def test_prompt_that_vllm_expands_otherwise_is_an_internal_error(
    renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises_error(kind=ErrorKind.INTERNAL, match="same model files"):
        await prompts_of(renderer, monkeypatch).prompt(array("I", [FILM] * 3), [item(VIDEO, 0, b"a", FILM, 3)], "", 0)


async def test_file_that_vllm_cannot_read_is_refused_with_its_reason(
    renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [item(AUDIO, 0, b"a", SOUND), item(AUDIO, 2, b"broken", SOUND)]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, match=r"media\[1\] as audio: no header; send a complete file"):
        await prompts_of(renderer, monkeypatch).prompt(array("I", [SOUND] * 4), items, "", 0)


async def test_file_that_is_an_item_of_two_kinds_has_another_identifier_for_the_second(
    renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(renderer, monkeypatch)
    monkeypatch.setattr(media, "KNOWN_FILES", 1)
    film, sound = [item(VIDEO, 0, b"a", FILM)], [item(AUDIO, 0, b"a", SOUND)]
    for asked, token in (
        (film, FILM),
        (sound, SOUND),
        (film, FILM),
        ([item(AUDIO, 0, b"b", SOUND)], SOUND),
        (sound, SOUND),
    ):
        await prompts.prompt(array("I", [token] * 2), asked, "", 0)
    first, second, again, _, after = (next(iter(each["multi_modal_uuids"].values()))[0] for each in renderer.prompts)
    assert first == again == content_hash(b"a").hex()
    assert second != first
    assert len(second) == len(first)
    assert after == first, "the kind of a file is remembered without bound"


async def test_items_that_decode_to_more_than_the_bound_are_refused(
    renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(renderer, monkeypatch)
    ids, items = array("I", [SOUND] * 4), [item(AUDIO, 0, b"12345", SOUND), item(AUDIO, 2, b"67890", SOUND)]
    for bound in ("10", "0", ""):
        monkeypatch.setenv(DECODED_BYTES, bound)
        await prompts.prompt(ids, items, "", 0)
    monkeypatch.setenv(DECODED_BYTES, "9")
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, match="more than 9 bytes"):
        await prompts.prompt(ids, items, "", 0)


def test_frames_of_a_video_are_checked_before_they_are_decoded() -> None:
    class Loader:
        read: list[Any] = []  # noqa: RUF012

        @classmethod
        def read_frames(cls, cap: Any, frame_idx: list[int], total: int, *, frame_recovery: bool) -> int:
            cls.read.append(frame_idx)
            return len(frame_idx)

    cap = MagicMock()
    cap.get = {3: 10.0, 4: 20.0}.get
    budget = DecodedBudget(1_800, 1_800)
    assert _bounded(Loader(), budget).read_frames(cap, [0, 4, 8, 8], 9, frame_recovery=False) == 4
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media"):
        _bounded(Loader(), budget).read_frames(cap, [0, 2, 4, 8], 9, frame_recovery=False)
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, match="declares more than 262,144 frames"):
        _bounded(Loader(), budget).read_frames(cap, [0, 1 << 18], 1 << 20, frame_recovery=False)
    assert Loader.read == [[0, 4, 8, 8]]


async def test_kind_that_the_model_does_not_take_is_refused(renderer: FakeRenderer) -> None:
    prompts = MediaPrompts(SimpleNamespace(renderer=FakeRenderer(None)))
    assert prompts.kinds == frozenset()
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, match="kind audio"):
        await prompts.prompt(array("I", [SOUND] * 2), [item(AUDIO, 0, b"a", SOUND)], "", 0)


@pytest.mark.parametrize("has_connector", [True, False])
def test_card_offers_the_kinds_that_vllm_takes_without_a_connector(has_connector: bool) -> None:
    config = MagicMock()
    config.model_config.runner_type = "generate"
    config.parallel_config.data_parallel_size = 1
    if not has_connector:
        config.kv_transfer_config = None
    found = card.capabilities(config, has_events=True, media=[AUDIO, VIDEO])
    expected = set() if has_connector else {Capability.AUDIO, Capability.VIDEO}
    assert found & MEDIA == expected


async def test_items_of_isolated_kinds_are_read_by_the_decoder_and_others_here(
    renderer: FakeRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Decoder:
        def __init__(self, options: Mapping[MediaKind, Mapping[str, Any]]) -> None:
            self.options, self.running = options, 0

        async def start(self) -> None:
            self.running = 1

        async def decode(self, kind: MediaKind, data: bytes, budget: DecodedBudget) -> tuple[Any, Any]:
            return data.decode(), kind.capability

        async def close(self) -> None:
            self.running = 0

    prompts_of(renderer, monkeypatch)
    readers = {IMAGE: Reader({}, isolated=False), AUDIO: Reader({"rate": 1}, True), VIDEO: Reader({"frames": 2}, True)}
    monkeypatch.setattr(media, "readers_of", lambda config, info: readers)
    monkeypatch.setattr(media, "ClipDecoder", Decoder)
    monkeypatch.setattr(library, "media_of", lambda decoded, data: (decoded, data))
    prompts = MediaPrompts(SimpleNamespace(renderer=renderer, model_config=SimpleNamespace(hf_config=None)))
    await prompts.start()
    decoder = cast(Decoder, prompts._decoder)
    assert decoder.options == {AUDIO: {"rate": 1}, VIDEO: {"frames": 2}}
    assert decoder.running
    items = [item(IMAGE, 0, b"i", PICTURE), item(AUDIO, 2, b"a", SOUND), item(VIDEO, 4, b"v", FILM)]
    await prompts.prompt(array("I", [PICTURE] * 2 + [SOUND] * 2 + [FILM] * 2), items, "", 0)
    assert renderer.prompts[0]["multi_modal_data"] == {
        "image": ["i"],
        "audio": [("a", "audio")],
        "video": [(("v", "video"), b"v")],
    }
    await prompts.close()
    assert not decoder.running
