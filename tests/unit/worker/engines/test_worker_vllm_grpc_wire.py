"""Messages of vLLM's gRPC server, both ways."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from services.common.base.errors import SluiceError
from services.worker.contract.cache_events import CacheTier
from services.worker.contract.engine import Load
from services.worker.contract.generation import (
    Delta,
    Disaggregation,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    Role,
    SamplingParams,
    StopParams,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from services.worker.engines.inprocess.sampling import Facts
from services.worker.engines.vllm.handoff import Handoff
from services.worker.engines.vllm_grpc import wire
from services.worker.engines.vllm_grpc.options import read_server_options, serve_command
from services.worker.engines.vllm_grpc.response_reader import ResponseReader
from services.worker.kv_events.events import EngineCleared, EngineRemoved, EngineStored
from services.worker.settings import WorkerSettings

FACTS = Facts(context_length=100)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest("r", "m", array("I", range(10)), **fields)


def test_a_request_in_their_words() -> None:
    asked = request(
        sampling=SamplingParams(temperature=0.0, top_k=-1, seed=-5, logit_bias={3: 1.5}),
        stop=StopParams(max_tokens=7, stop_token_ids=frozenset({2}), ignore_eos=True),
        logprobs=3,
        guided=StructuredOutput("choice", ("a", "b")),
        data_parallel_rank=1,
    )
    message = wire.write_request(asked, FACTS, None)
    options = message.sampling_params
    assert list(message.tokenized.input_ids) == list(range(10))
    assert (message.stream, message.data_parallel_rank) == (True, 1)
    assert (options.temperature, options.HasField("temperature"), options.top_k, options.seed) == (0.0, True, 0, -5)
    assert (options.max_tokens, list(options.stop_token_ids), options.ignore_eos) == (7, [2], True)
    assert dict(options.logit_bias) == {3: 1.5}
    assert options.logprobs == 4, "one more, for the chosen token takes a place"
    assert list(options.choice.choices) == ["a", "b"]


@pytest.mark.parametrize(
    ("guided", "field"),
    [
        (StructuredOutput("json_schema", "{}"), "json_schema"),
        (StructuredOutput("json_object"), "json_object"),
        (StructuredOutput("regex", "a"), "regex"),
        (StructuredOutput("ebnf", "root ::= a"), "grammar"),
        (StructuredOutput("structural_tag", "{}"), "structural_tag"),
    ],
)
def test_constraints(guided: StructuredOutput, field: str) -> None:
    message = wire.write_request(request(guided=guided), FACTS, None)
    assert message.sampling_params.WhichOneof("constraint") == field


def test_a_seed_of_64_bits_is_refused() -> None:
    with pytest.raises(SluiceError, match="32-bit"):
        wire.write_request(request(sampling=SamplingParams(seed=1 << 40)), FACTS, None)


def test_handoff_is_sent_in_kv_transfer_params() -> None:
    asked = request(disaggregation=Disaggregation(Role.DECODE))
    message = wire.write_request(asked, FACTS, Handoff(77, {"remote_port": 1}))
    assert list(message.tokenized.input_ids) == [*range(10), 77]
    assert message.kv_transfer_params_json == '{"remote_port": 1}'


def chunk(token_ids: list[int], **fields: Any) -> Any:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=token_ids, **fields))


def complete(reason: str, **fields: Any) -> Any:
    return pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=reason, **fields))


def test_answers_become_deltas() -> None:
    reading = ResponseReader(request())
    assert reading.take(chunk([])) is None
    assert reading.take(chunk([5, 6], cached_tokens=8)) == Delta([5, 6], cached_tokens=8)
    assert reading.take(chunk([7])) == Delta([7])
    assert not reading.ended
    end = reading.take(complete("stop", output_ids=[7], matched_token_id=7))
    assert end == Delta(finish_reason=FinishReason.STOP, usage=Usage(10, 3, 8), stop_token_id=7)
    assert reading.ended


def test_a_prefill_ends_with_a_handoff() -> None:
    reading = ResponseReader(request(disaggregation=Disaggregation(Role.PREFILL)))
    reading.take(chunk([5]))
    end = reading.take(complete("length", kv_transfer_params_json='{"remote_host": "h"}'))
    assert end is not None
    assert (end.finish_reason, end.handoff) == (FinishReason.HANDOFF, Handoff(5, {"remote_host": "h"}).pack())


def test_log_probabilities_are_ranked_by_their_place() -> None:
    found = pb.OutputLogProbs(
        token_logprobs=[-2.0, -0.5],
        token_ids=[9, 4],
        top_logprobs=[
            pb.TopLogProbs(values=[-2.0, -0.25, -0.5], token_ids=[9, 3, 4]),
            pb.TopLogProbs(values=[-0.5, -0.25, -2.0], token_ids=[4, 3, 9]),
        ],
    )
    assert wire.read_logprobs(found, [9, 4], 2) == [
        PositionLogprobs(TokenLogprob(9, -2.0, 0), (TokenLogprob(3, -0.25, 1), TokenLogprob(4, -0.5, 2))),
        PositionLogprobs(TokenLogprob(4, -0.5, 2), (TokenLogprob(3, -0.25, 1), TokenLogprob(4, -0.5, 2))),
    ]
    prompt = pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), pb.InputTokenLogProb(value=-1.5)], token_ids=[1, 2]
    )
    assert wire.read_prompt_logprobs(prompt, 0) == [
        PositionLogprobs(TokenLogprob(1, 0.0)),
        PositionLogprobs(TokenLogprob(2, -1.5)),
    ]


def test_kv_events_are_decoded_from_the_engines_format() -> None:
    block = common_pb2.KvBlock(block_hash=-1, token_ids=[1, 2], block_size=2)
    image = common_pb2.KvBlockExtraKey(multimodal=common_pb2.KvMultimodalKey(identifier="i", offset=1))
    other = common_pb2.KvBlock(block_hash=5, token_ids=[3, 4], block_size=2, extra_keys=[image])
    stored = common_pb2.KvBlocksStored(blocks=[block, other], parent_block_hash=-2, lora_name="tone", cache_salt="s")
    remote = common_pb2.KvBlocksRemoved(block_hashes=[1], locality=common_pb2.KV_CACHE_LOCALITY_REMOTE)
    removed = common_pb2.KvBlocksRemoved(block_hashes=[5], tier=common_pb2.KV_CACHE_TIER_HOST)
    batch = wire.read_batch(
        common_pb2.KvEventBatch(
            timestamp=1.5,
            dp_rank=1,
            events=[
                common_pb2.KvCacheEvent(stored=stored),
                common_pb2.KvCacheEvent(removed=remote),
                common_pb2.KvCacheEvent(removed=removed),
                common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()),
            ],
        )
    )
    assert (batch.time, batch.rank) == (1.5, 1)
    assert batch.events == [
        EngineStored([2**64 - 1, 5], 2**64 - 2, array("I", [1, 2, 3, 4]), 2, lora="tone", salt="s", opaque_from=1),
        EngineRemoved([5], CacheTier.HOST),
        EngineCleared(),
    ]


def test_loads_come_by_rank() -> None:
    answer = pb.GetLoadsResponse(
        loads=[
            pb.SchedulerLoad(dp_rank=1, num_running_reqs=2),
            pb.SchedulerLoad(dp_rank=0, num_waiting_reqs=3, token_usage=0.25),
        ]
    )
    assert wire.read_loads(answer, 100) == [Load(waiting_requests=3, used_blocks=25), Load(running_requests=2)]


def settings(*argv: str) -> WorkerSettings:
    return WorkerSettings.load(["--engine", "vllm-grpc", "--model", "tiny=/models/tiny", *argv])


def test_started_server_receives_vllm_flags() -> None:
    options = read_server_options(
        settings("--block-size", "32", "--engine-args", "start_s=30,enforce_eager=true", "--", "--dtype", "float32"),
        "/models/tiny",
    )
    assert options.start_s == 30
    assert serve_command("vllm", options.flags, 7000, {"publisher": "zmq"}) == [
        *("vllm", "serve", "/models/tiny", "--grpc", "--host", "127.0.0.1", "--port", "7000"),
        *("--served-model-name", "tiny", "--block-size", "32", "--enforce-eager", "--dtype", "float32"),
        *("--kv-events-config", '{"publisher": "zmq"}'),
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ("--engine-args", "address=h:1,enforce_eager=true"),
        ("--engine-args", "address=h:1", "--", "--enforce-eager"),
        ("--engine-args", "start_s=soon"),
        ("--adapters", "tone=/x"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(SluiceError):
        read_server_options(settings(*argv), "/models/tiny")


@pytest.mark.parametrize(
    ("argv", "profiles"),
    [
        ((), False),
        (("--", "--profiler-config.profiler=torch"), True),
        (("--", "--profiler-config", '{"profiler": "torch"}'), True),
        (("--engine-args", '{"profiler_config": {"profiler": "torch"}}'), True),
        (("--engine-args", "address=127.0.0.1:1"), False),
    ],
)
def test_a_profiler_is_claimed_where_the_server_gets_one(argv: tuple[str, ...], profiles: bool) -> None:
    assert read_server_options(settings(*argv), "/models/tiny").profiles is profiles
