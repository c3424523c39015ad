"""Chats with audio and videos through vLLM's own code, in its process: ids and spans are those of the rules of `hf`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from services.common.base.errors import SluiceError
from services.common.base.packing import unpack_u32
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.engines.engine_tokenizer import EngineTokenizer
from services.preprocess.media.expansion import expand
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.probes import media_fingerprint
from tests.engines.media_chats import media_chats
from tests.engines.test_engines_image_processor import options
from tests.engines.test_engines_media import BUILDERS, TOKENS
from tests.support.data.loaded_tokenizers import limits

pytestmark = pytest.mark.engines

CLIPS = 60


@dataclass
class Both:
    """A model's tokenizers: vLLM's, and the one of preprocess."""

    kind: MediaKind
    engine: EngineTokenizer
    hf: HfTokenizer


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda kind: kind.capability)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = BUILDERS[request.param](tmp_path_factory.mktemp("media") / "model")
    engine = EngineTokenizer("vllm", folder, options("vllm"))
    yield Both(request.param, engine, HfTokenizer(folder, limits()))
    engine.close()


def test_engine_processor_makes_the_ids_and_spans_of_the_rules_for_clips(both: Both) -> None:
    assert both.engine.media_kinds == both.hf.media_rules.keys()
    spans = 0
    for chat in media_chats(both.kind, CLIPS, 43):
        made = both.engine.pack_media(chat.request, chat.items, chat.files)
        assert made == expand(both.hf.pack_chat(chat.request), both.hf.media_rules, chat.items), chat.items
        spans += len(made[1])
    assert spans == CLIPS


def test_media_fingerprint_of_vllm_equals_that_of_the_rules_for_clips(both: Both) -> None:
    assert media_fingerprint(both.engine) == media_fingerprint(both.hf) != ""


def test_engine_processor_renders_a_placeholder_for_each_clip(both: Both) -> None:
    (chat,) = media_chats(both.kind, 1, 5)
    assert both.engine.render(chat.request).count(TOKENS[both.kind]) == 1


def test_engine_processor_with_a_typed_placeholder_beside_a_clip_refuses_it(both: Both) -> None:
    (chat,) = media_chats(both.kind, 1, 5)
    typed = {"role": "user", "content": f"see {TOKENS[both.kind]}"}
    with pytest.raises(SluiceError):
        both.engine.pack_media(ChatRequest([*chat.numbered, typed]), chat.items, chat.files)
    ids = unpack_u32(both.hf.pack_chat(ChatRequest([*chat.numbered, typed])))
    assert ids.count(both.hf.media_rules[both.kind].token_id) == 1, "the processor hf keeps it as text"
