"""Token ids of requests and of models' defaults are checked once, against the vocabulary, for every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import FinishReason, GenerateRequest, SamplingParams, StopParams
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.generation.validation import (
    MAX_TOKEN_ID,
    usable_defaults,
    validate,
    validate_embedding,
    without_unknown_eos,
)
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import ScriptedEngine, request
from tests.support.oracles.errors import raises_error

VOCAB = 542
ENGINE = EngineConfig(
    model="tiny",
    source="",
    processor="",
    fingerprint="",
    context_length=2048,
    vocab_size=VOCAB,
    block_size=16,
    total_blocks=64,
    max_sequences=8,
    max_batched_tokens=512,
    eos_token_ids=(2,),
    capabilities=frozenset(
        {"token_ids", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "engine_options", "ignore_eos"}
    ),
)
FIELDS: dict[str, Callable[[int], GenerateRequest]] = {
    "prompt": lambda token_id: request(prompt=(5, token_id)),
    "stop_token_ids": lambda token_id: replace(
        request(), stop=StopParams(max_tokens=5, min_tokens=1, stop_token_ids=frozenset({2, token_id}))
    ),
    "logit_bias": lambda token_id: request(sampling=SamplingParams(logit_bias={3: 1.0, token_id: 1.0})),
    "allowed_token_ids": lambda token_id: request(sampling=SamplingParams(allowed_token_ids=(3, token_id))),
    "bad_words": lambda token_id: request(sampling=SamplingParams(bad_words=((3,), (4, token_id)))),
    "engine_options.logprob_token_ids": lambda token_id: request(
        sampling=SamplingParams(engine_options={"logprob_token_ids": [3, token_id]})
    ),
}


@pytest.mark.parametrize("field", FIELDS)
@given(token_id=st.integers(VOCAB, (1 << 32) - 1) | st.sampled_from([VOCAB, MAX_TOKEN_ID, MAX_TOKEN_ID + 1]))
def test_token_id_outside_the_vocabulary_is_refused_with_its_field(field: str, token_id: int) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=field) as refusal:
        validate(FIELDS[field](token_id), ENGINE)
    assert str(VOCAB) in refusal.value.message


@pytest.mark.parametrize("field", FIELDS)
@given(token_id=st.integers(0, VOCAB - 1))
def test_token_id_of_the_vocabulary_is_accepted(field: str, token_id: int) -> None:
    validate(FIELDS[field](token_id), ENGINE)


@pytest.mark.parametrize("field", FIELDS)
def test_token_id_over_31_bits_is_refused_where_the_vocabulary_is_unknown(field: str) -> None:
    unknown = replace(ENGINE, vocab_size=0)
    validate(FIELDS[field](MAX_TOKEN_ID), unknown)
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=field):
        validate(FIELDS[field](MAX_TOKEN_ID + 1), unknown)


def test_token_id_of_an_input_to_embed_over_31_bits_is_refused_where_the_vocabulary_is_unknown() -> None:
    config = replace(ENGINE, vocab_size=0, capabilities=frozenset({"embeddings"}))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="input"):
        validate_embedding("tiny", "", [request(prompt=(MAX_TOKEN_ID + 1,)).token_ids], 0, config)


@pytest.mark.parametrize("value", ["7", [1.5], [True], {"a": 1}, [[1]]])
def test_engine_option_of_token_ids_that_is_no_list_of_ids_is_refused(value: Any) -> None:
    asked = request(sampling=SamplingParams(engine_options={"logprob_token_ids": value}))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="engine_options.logprob_token_ids"):
        validate(asked, ENGINE)


@pytest.mark.parametrize(
    ("allowed", "bad_words", "stops", "min_tokens", "left"),
    [
        ((5, 6), (), (5, 6), 1, False),
        ((5, 6), ((5,),), (6,), 1, False),
        ((5, 6), ((5,), (6,)), (), 0, False),
        ((5, 6), (), (5, 6), 0, True),
        ((5, 6), ((5, 6), (6, 5)), (), 0, True),
        ((5, 6), ((5,),), (), 3, True),
    ],
)
def test_allowed_token_ids_of_which_none_may_be_generated_are_refused(
    allowed: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    stops: tuple[int, ...],
    min_tokens: int,
    left: bool,
) -> None:
    stop = StopParams(max_tokens=5, min_tokens=min_tokens, stop_token_ids=frozenset(stops))
    asked = replace(request(sampling=SamplingParams(allowed_token_ids=allowed, bad_words=bad_words)), stop=stop)
    if left:
        validate(asked, ENGINE)
    else:
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="allowed_token_ids"):
            validate(asked, ENGINE)


def test_min_tokens_over_the_context_are_refused_without_max_tokens() -> None:
    validate(replace(request(), stop=StopParams(min_tokens=2048)), ENGINE)
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="min_tokens"):
        validate(replace(request(), stop=StopParams(min_tokens=2049)), ENGINE)


def test_default_eos_ids_outside_the_vocabulary_are_dropped_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    config = usable_defaults(replace(ENGINE, eos_token_ids=(2, VOCAB, 151_645)))
    assert config.eos_token_ids == (2,)
    assert "end-of-sequence ids outside its vocabulary" in caplog.text
    assert usable_defaults(ENGINE) is ENGINE


async def test_request_with_the_defaults_of_another_tokenizer_is_served_without_them() -> None:
    class Engine(ScriptedEngine):
        stop: StopParams | None = None

        def generate(self, request: GenerateRequest, context: Any) -> Any:
            Engine.stop = request.stop
            return super().generate(request, context)

    worker = Worker(Engine([]), "w")
    await worker.start()
    size = worker.config.vocab_size
    assert size
    stop = StopParams(5, 1, frozenset({2, 3, size + 9}), (2, size + 9))
    ends: list[FinishReason] = []
    sink = StreamResponseSink()
    worker.submit(replace(request("a"), stop=stop), sink)
    ends += [delta.finish_reason async for delta in sink.deltas() if delta.finish_reason]
    assert Engine.stop == StopParams(5, 1, frozenset({2, 3}), (2,))
    with pytest.raises(SluiceError, match="stop_token_ids"):
        worker.submit(replace(request("b"), stop=replace(stop, eos_token_ids=(2,))), StreamResponseSink())
    assert without_unknown_eos(request("c"), worker.config) == request("c")
