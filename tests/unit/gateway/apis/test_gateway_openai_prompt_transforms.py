"""Words that must not come out, cut prompts, gaps to be filled, and errors in the client's own names."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.common.base import budgets
from services.common.base.errors import ErrorKind, invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.rpc.generation import read_sampling
from services.gateway.admission.keys import ANONYMOUS
from services.gateway.admission.permit import OPEN, Permit
from services.gateway.apis.openai.prompt_transforms import MAX_WORD_CHARACTERS, needs_tokenizer, resolve_all
from services.gateway.apis.openai.schemas import CompletionRequest
from services.gateway.apis.openai.translate import client_names, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.backends.rpc.preprocess import PreprocessClient
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import (
    GenerationRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenizedPrompt,
    TokenPrompt,
)
from sluice.v1 import common_pb2
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error

ENTRY = WorkerEntry("w", "127.0.0.1:1", 1, "m", 16, 20, 256, frozenset(), 0)


class Preprocess:
    """One id a byte, after a 1 where special tokens are added; the given markers are ids from 1000."""

    def __init__(self, *markers: str) -> None:
        self.texts: list[str] = []
        self.markers = {marker: 1000 + index for index, marker in enumerate(markers)}

    async def tokenize(
        self, model: str, prompt: Prompt, block_size: int = 0, lora: str = "", cache_salt: str = ""
    ) -> TokenizedPrompt:
        if isinstance(prompt, TokenPrompt):
            return TokenizedPrompt(prompt.token_ids, b"", "", b"", b"", 0, b"")
        assert isinstance(prompt, TextPrompt)
        self.texts.append(prompt.text)
        ids = [self.markers[prompt.text]] if prompt.text in self.markers else list(prompt.text.encode())
        special = [] if prompt.add_special_tokens is False else [1]
        return TokenizedPrompt(pack_u32([*special, *ids]), b"", "", b"", b"", 0, b"")


class Charged(Permit):
    """A permit that records the tokens charged and used."""

    def __init__(self) -> None:
        super().__init__(ANONYMOUS, "", None, None)
        self.tokens = [0, 0]

    async def charge(self, tokens: int) -> None:
        self.tokens[0] += tokens

    def spent(self, tokens: int) -> None:
        self.tokens[1] += tokens


async def all_resolved(preprocess: Preprocess, permit: Permit, **fields: Any) -> list[GenerationRequest]:
    checked = check(CompletionRequest, {"model": "m", "prompt": "abc", **fields}, BUDGETS)
    requests = completion_requests(checked, "r", 8, BUDGETS)
    assert needs_tokenizer(checked)
    return await resolve_all(requests, checked, ENTRY, cast(PreprocessClient, preprocess), permit)


async def resolved(preprocess: Preprocess, **fields: Any) -> GenerationRequest:
    return (await all_resolved(preprocess, OPEN, **fields))[0]


def ids_of(request: GenerationRequest) -> list[int]:
    assert isinstance(request.prompt, TokenPrompt)
    return unpack_u32(request.prompt.token_ids).tolist()


async def test_bad_words_with_and_without_a_space() -> None:
    request = await resolved(Preprocess(), bad_words=["ab", " c"])
    assert request.sampling.bad_words == (tuple(b"ab"), tuple(b" ab"), tuple(b"c"), tuple(b" c"))


async def test_bad_words_of_many_prompts_are_tokenized_and_charged_once() -> None:
    preprocess, permit = Preprocess(), Charged()
    requests = await all_resolved(preprocess, permit, prompt=["a", "b", "c"], bad_words=["ab", "ab", " ab"])
    assert preprocess.texts == ["ab", " ab"]
    assert permit.tokens == [5, 5]
    assert len({id(request.sampling.bad_words) for request in requests}) == 1


async def test_bad_words_beyond_their_budget_are_refused_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = list[str]()
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    preprocess = Preprocess()
    with raises_error(param="bad_words", kind=ErrorKind.INVALID_ARGUMENT, match=str(MAX_WORD_CHARACTERS)):
        await resolved(preprocess, bad_words=["x" * (MAX_WORD_CHARACTERS // 2), "y" * (MAX_WORD_CHARACTERS // 2 + 1)])
    assert (preprocess.texts, refused) == ([], ["word_characters"])


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"truncate_prompt_tokens": 2}, list(b"bc")),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, *b"a"]),
        ({"prompt": "x" * 50, "truncate_prompt_tokens": -1, "max_tokens": 5}, list(b"x" * 15)),
    ],
)
async def test_prompts_are_cut(fields: dict[str, Any], ids: list[int]) -> None:
    assert ids_of(await resolved(Preprocess(), **fields)) == ids


async def test_short_prompts_stay_as_they_are() -> None:
    assert (await resolved(Preprocess(), truncate_prompt_tokens=9)).prompt == TextPrompt("abc")


async def test_a_gap_is_written_in_the_models_markers() -> None:
    preprocess = Preprocess("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    assert ids_of(await resolved(preprocess, suffix="z")) == [1, 1000, *b"abc", 1001, *b"z", 1002]


async def test_models_without_markers_cannot_fill_a_gap() -> None:
    with raises_error(param="suffix", code="unsupported_parameter"):
        await resolved(Preprocess(), suffix="z")


def test_errors_of_workers_name_the_clients_field() -> None:
    fields = check(
        CompletionRequest,
        {"model": "m", "prompt": "x", "guided_regex": "a", "custom_params": {"a": 1}, "extra_key": "k"},
        BUDGETS,
    )
    names = client_names(fields, completion_requests(fields, "r", 8, BUDGETS)[0])
    for said, heard in (
        ("response_format", "guided_regex"),
        ("engine_options", "custom_params"),
        ("cache_salt", "extra_key"),
        ("lora", "lora_path"),
        ("temperature", "temperature"),
    ):
        error = names.rename(invalid(f"Leave out {said}.", param=said, code="c"))
        assert (error.param, error.message, error.code) == (heard, f"Leave out {heard}.", "c")


def test_what_the_client_leaves_unset_is_what_the_model_recommends() -> None:
    recommended = read_sampling(common_pb2.SamplingOptions(temperature=0.5, top_k=20, seed=7))
    asked = SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias={1: 2.0})
    assert asked.or_else(recommended) == SamplingParams(
        temperature=0.0, top_k=20, frequency_penalty=1.0, logit_bias={1: 2.0}
    )


def test_without_recommendations_nothing_changes() -> None:
    asked = SamplingParams(top_p=0.5)
    assert asked.or_else(read_sampling(common_pb2.SamplingOptions())) is asked
