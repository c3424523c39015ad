"""Placeholders of images: read from the model's files, expanded, and kept apart from text that looks like them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.types.media.facts import ImageFacts
from services.common.types.media.parts import MediaInput
from services.common.types.media.spans import SAMPLES, MediaKind
from services.preprocess.contract.tokenizer import ChatRequest, ImageRule
from services.preprocess.contract.validation import check_messages
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.media.rules import ModelFiles, PatchGrid, ResizedGrid, image_rule
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.probes import media_fingerprint
from tests.support.data.loaded_tokenizers import limits, tiny_hf
from tests.support.data.tiny_vlm import LLAVA_TOKENS_PER_IMAGE, VisionFolders, build_vision_models
from tests.support.oracles.errors import raises_error

LOOK = {"type": "text", "text": "Look: "}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> VisionFolders:
    return build_vision_models(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def llava(folders: VisionFolders) -> HfTokenizer:
    return HfTokenizer(folders.llava, limits())


@pytest.fixture(scope="module")
def qwen(folders: VisionFolders) -> HfTokenizer:
    return HfTokenizer(folders.qwen2_vl, limits())


def items(*sizes: tuple[int, int]) -> list[CountedItem]:
    return [
        CountedItem(f"messages[0].content[{index}]", bytes([index]) * 16, ImageFacts(*size, "PNG"))
        for index, size in enumerate(sizes)
    ]


def user(*parts: dict[str, Any] | str) -> ChatRequest:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return ChatRequest([{"role": "user", "content": content}])


def image(index: int) -> dict[str, Any]:
    return {"type": "image", "media": index}


def test_image_rule_of_models_without_images_is_none() -> None:
    assert not tiny_hf().media_rules
    assert media_fingerprint(tiny_hf()) == ""
    assert image_rule(ModelFiles({"image_token_id": 5}, {"processor_class": "OtherProcessor"}, {})) is None


@pytest.mark.parametrize(
    "broken",
    [
        {"image_token_index": None},
        {"image_token_index": True},
        {"image_token_index": "5"},
    ],
)
def test_image_rule_with_a_malformed_token_is_none(broken: dict[str, Any]) -> None:
    preprocessor = {"processor_class": "LlavaProcessor", "crop_size": 56, "patch_size": 14}
    assert image_rule(ModelFiles(broken, preprocessor, {"patch_size": 14})) is None


@pytest.mark.parametrize(
    ("processor", "tokens"),
    [
        ({"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}, 576),
        ({"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "full"}, 577),
        ({"patch_size": 16, "vision_feature_select_strategy": "full"}, 441),
    ],
)
def test_image_rule_of_llava_counts_patches(processor: dict[str, Any], tokens: int) -> None:
    preprocessor = {"processor_class": "LlavaProcessor", "crop_size": {"height": 336, "width": 336}}
    assert image_rule(ModelFiles({"image_token_index": 5}, preprocessor, processor)) == PatchGrid(5, tokens)


def test_image_rule_of_llava_without_a_fixed_size_is_none() -> None:
    preprocessor = {"processor_class": "LlavaProcessor", "size": {"shortest_edge": 336}, "do_center_crop": False}
    assert image_rule(ModelFiles({"image_token_index": 5}, preprocessor, {"patch_size": 14})) is None


@pytest.mark.parametrize(
    "bounds",
    [{"min_pixels": 3136, "max_pixels": 1_003_520}, {"size": {"shortest_edge": 3136, "longest_edge": 1_003_520}}, {}],
)
def test_image_rule_of_qwen2_vl_reads_bounds_in_every_form(bounds: dict[str, Any]) -> None:
    preprocessor = {"processor_class": "Qwen2VLProcessor", "patch_size": 14, "merge_size": 2, **bounds}
    assert image_rule(ModelFiles({"image_token_id": 5}, preprocessor, {})) == ResizedGrid(5, 28, 3136, 1_003_520)


@pytest.mark.parametrize("values", [{"patch_size": 0}, {"min_pixels": 9_999_999}, {"max_pixels": 1 << 50}])
def test_image_rule_of_qwen2_vl_with_impossible_numbers_is_none(values: dict[str, Any]) -> None:
    assert image_rule(ModelFiles({"image_token_id": 5}, {"processor_class": "Qwen2VLProcessor", **values}, {})) is None


@pytest.mark.parametrize("size", [(1, 201), (5000, 20)])
def test_resized_grid_extreme_shape_is_refused_by_name(size: tuple[int, int], qwen: HfTokenizer) -> None:
    assert MediaKind.IMAGE in qwen.media_rules
    packed = qwen.pack_chat(user(image(0)))
    with raises_error(param="messages[0].content[0]"):
        expand(packed, qwen.media_rules, items(size))


def test_expand_inserts_each_item_at_its_placeholder_in_order(qwen: HfTokenizer) -> None:
    rule = qwen.media_rules[MediaKind.IMAGE]
    assert isinstance(rule, ResizedGrid)
    sizes = [(100, 80), (90, 160), (56, 56)]
    packed = qwen.pack_chat(user("a", image(0), "b", image(1), image(2), "c"))
    expanded, spans = expand(packed, {MediaKind.IMAGE: rule}, items(*sizes))
    ids, before = unpack_u32(expanded).tolist(), unpack_u32(packed).tolist()
    assert [span.length for span in spans] == [12, 18, 4]
    assert [span.hash[0] for span in spans] == [0, 1, 2]
    for span in spans:
        assert ids[span.offset : span.end] == [rule.token_id] * span.length
        assert ids[span.offset - 1] != rule.token_id
        assert span.encoder_tokens == span.length
    for span in reversed(spans):
        ids[span.offset : span.end] = unpack_u32(span.unexpanded_ids).tolist()
    assert ids == before


@pytest.mark.parametrize("count", [0, 1, 3])
def test_expand_another_number_of_placeholders_is_refused(count: int, llava: HfTokenizer) -> None:
    assert MediaKind.IMAGE in llava.media_rules
    packed = llava.pack_chat(user(image(0), "b", image(1)))
    with pytest.raises(SluiceError, match="writes 2 placeholders") as caught:
        expand(packed, llava.media_rules, items(*[(9, 9)] * count))
    assert caught.value.code == "invalid_media"


@pytest.mark.parametrize("name", ["llava", "qwen"])
@pytest.mark.parametrize("where", ["user text", "system", "tool result", "tools", "name"])
def test_pack_chat_typed_placeholders_stay_text(name: str, where: str, request: pytest.FixtureRequest) -> None:
    tokenizer: HfTokenizer = request.getfixturevalue(name)
    rule = tokenizer.media_rules[MediaKind.IMAGE]
    assert rule is not None
    typed = tokenizer.decode([rule.token_id])
    chat = ChatRequest([{"role": "user", "content": [LOOK, image(0)]}])
    messages: list[dict[str, Any]] = [*chat.messages]
    tools = None
    if where == "user text":
        messages = [{"role": "user", "content": [{"type": "text", "text": f"{typed} or {typed}?"}, image(0)]}]
    elif where == "system":
        messages.insert(0, {"role": "system", "content": f"Say {typed}."})
    elif where == "tool result":
        messages.append({"role": "tool", "tool_call_id": "1", "content": f"found {typed}"})
    elif where == "tools":
        tools = [{"type": "function", "function": {"name": "f", "description": typed}}]
    else:
        messages.append({"role": "assistant", "content": typed})
    chat = replace(chat, messages=messages, tools=tools)
    packed = tokenizer.pack_chat(chat)
    ids = unpack_u32(packed).tolist()
    assert ids.count(rule.token_id) == 1
    expand(packed, {MediaKind.IMAGE: rule}, items((64, 64)))
    assert tokenizer.decode(ids) == tokenizer.render(chat)
    assert tokenizer.decode(ids).count(typed) >= 2
    text_only = replace(chat, messages=[{"role": "user", "content": typed}], tools=None)
    assert rule.token_id not in unpack_u32(tokenizer.pack_chat(text_only)).tolist()


def test_pack_chat_without_typed_placeholders_equals_the_second_tokenizer(llava: HfTokenizer) -> None:
    """Both ways to the ids of a prompt agree, so that a typed placeholder changes nothing but itself."""
    assert llava._placeholders is not None
    chat = user("Grüße  你好 <|im_end|> ", image(0), "\n\nand", image(1))
    assert llava._pack_hidden(llava.render(chat)) == llava.pack_chat(chat)


async def test_template_of_the_request_runs_apart_and_keeps_typed_placeholders(llava: HfTokenizer) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<image>' }}|{% endfor %}{% endfor %}"
    chat = replace(user("typed <image>", image(0)), chat_template=template)
    pending = llava.begin_chat(chat)
    assert pending is not None
    assert pending.pack is not None
    assert pending.shown is not None
    text = await pending.text()
    rule = llava.media_rules[MediaKind.IMAGE]
    assert rule is not None
    packed = pending.pack(text)
    assert unpack_u32(packed).tolist().count(rule.token_id) == 1
    assert pending.shown(text) == "typed <image>|<image>|"


def test_template_for_strings_refuses_images(folders: VisionFolders) -> None:
    tokenizer = HfTokenizer(folders.llava, limits(), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with raises_error(param="messages"):
        tokenizer.pack_chat(user("a", image(0)))


def test_continued_message_that_ends_with_an_image_is_refused(llava: HfTokenizer) -> None:
    with raises_error(param="continue_final_message"):
        llava.pack_chat(replace(user("a", image(0)), continue_final_message=True))


def test_media_fingerprint_has_the_samples_of_each_kind_in_order(qwen: HfTokenizer) -> None:
    taken = [kind in qwen.media_rules for kind, samples in SAMPLES.items() for _ in range(samples)]
    assert [digest != "-" for digest in media_fingerprint(qwen).split(",")] == taken


def test_media_fingerprint_differs_with_the_rule_and_not_with_the_load(
    folders: VisionFolders, qwen: HfTokenizer, tmp_path: Path
) -> None:
    again = HfTokenizer(folders.qwen2_vl, limits())
    assert media_fingerprint(again) == media_fingerprint(qwen)
    assert len(set(media_fingerprint(qwen).split(","))) == 7
    other = tmp_path / "other"
    other.mkdir()
    for file in folders.qwen2_vl.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({**config, "max_pixels": config["max_pixels"] // 2}))
    assert media_fingerprint(HfTokenizer(other, limits())) != media_fingerprint(qwen)
    assert HfTokenizer(other, limits()).facts.fingerprint != qwen.facts.fingerprint


def test_llava_image_has_the_tokens_of_the_folder(llava: HfTokenizer) -> None:
    rule = llava.media_rules[MediaKind.IMAGE]
    assert isinstance(rule, ImageRule)
    assert len(rule.ids(9, 9)) == LLAVA_TOKENS_PER_IMAGE
    assert pack_u32(rule.ids(2000, 10)) == pack_u32([rule.token_id] * LLAVA_TOKENS_PER_IMAGE)


def given(*kinds: MediaKind) -> list[MediaInput]:
    return [MediaInput(f"input[{index}]", kind, b"x") for index, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("parts", "media", "param"),
    [
        ([image(0)], [], "messages[0].content[0].type"),
        ([image(1)], given(MediaKind.IMAGE), "messages[0].content[0].media"),
        ([image(True)], given(MediaKind.IMAGE, MediaKind.IMAGE), "messages[0].content[0].media"),
        ([image(False)], given(MediaKind.IMAGE), "messages[0].content[0].media"),
        ([{"type": "image"}], given(MediaKind.IMAGE), "messages[0].content[0].media"),
        ([image(0), image(0)], given(MediaKind.IMAGE, MediaKind.IMAGE), "messages[0].content[1].media"),
        ([image(1), image(0)], given(MediaKind.IMAGE, MediaKind.IMAGE), "messages[0].content[0].media"),
        ([image(0)], given(MediaKind.AUDIO), "messages[0].content[0].type"),
        ([image(0), LOOK], given(MediaKind.IMAGE, MediaKind.VIDEO), "input[1]"),
        ([{"type": "image_url"}], given(MediaKind.IMAGE), "messages[0].content[0].type"),
    ],
)
def test_check_messages_wrong_references_are_refused(
    parts: list[dict[str, Any]], media: Sequence[MediaInput], param: str
) -> None:
    with raises_error(param=param):
        check_messages([{"role": "user", "content": parts}], media)


def test_check_messages_references_in_order_over_messages_are_accepted() -> None:
    messages = [
        {"role": "user", "content": [image(0), LOOK, {"type": "audio", "media": 1}]},
        {"role": "tool", "tool_call_id": "1", "content": [image(2)]},
    ]
    kinds = (MediaKind.IMAGE, MediaKind.AUDIO, MediaKind.IMAGE)
    assert check_messages(messages, given(*kinds)) is messages
