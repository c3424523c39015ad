"""The http engine's requests to vLLM's and SGLang's servers, and how their responses are read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import Load
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    SamplingParams,
    StopParams,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from services.worker.engines.http import answers, card, sglang
from services.worker.engines.http.client import HttpClient, error_of
from services.worker.engines.http.dialect import Publisher
from services.worker.engines.http.events import chosen_publishers
from services.worker.engines.http.metrics import by_rank, read_gauges
from services.worker.engines.http.options import HttpOptions, read_http_options
from services.worker.engines.http.vllm import COMPLETIONS, GENERATE, VllmDialect
from services.worker.settings import WorkerSettings
from tests.support.data.tiny_models import build_tiny_model

MODELS = {"data": [{"id": "tiny", "root": "/m", "parent": None, "max_model_len": 100}]}


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest("r", "m", array("I", range(10)), **fields)


def served_by(paths: dict[str, Any]) -> HttpClient:
    """A client of a server that has these paths, with a status or a body each."""

    def answer(asked: httpx.Request) -> httpx.Response:
        found = paths.get(asked.url.path, 404)
        if isinstance(found, int):
            return httpx.Response(found, json={"error": "no"})
        return httpx.Response(200, content=found if isinstance(found, bytes) else orjson.dumps(found))

    return HttpClient("http://h:1", connections=httpx.MockTransport(answer))


async def vllm(*, scale_out: bool = False, **paths: Any) -> VllmDialect:
    dialect = VllmDialect()
    endpoints = {COMPLETIONS: 400, GENERATE: 422 if scale_out else 403}
    known = {"/version": {"version": "0.33.0"}, "/v1/models": MODELS, **endpoints}
    await dialect.describe(served_by(known | paths))
    return dialect


ASKED = request(
    sampling=SamplingParams(temperature=0.0, top_k=-1, seed=5, logit_bias={3: 1.5}),
    stop=StopParams(max_tokens=7, stop_token_ids=frozenset({2}), ignore_eos=True),
    logprobs=3,
    guided=StructuredOutput("choice", ("a", "b")),
    cache_salt="tenant",
    lora="poet",
    data_parallel_rank=1,
)


async def test_vllm_request_as_completion_has_token_ids_and_asks_for_token_ids() -> None:
    call = (await vllm()).call(ASKED, "id")
    assert (call.path, call.headers) == ("/v1/completions", {"X-data-parallel-rank": "1"})
    expected = {
        "request_id": "id",
        "model": "poet",
        "prompt": list(range(10)),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": "tenant",
        "temperature": 0.0,
        "max_tokens": 7,
        "stop_token_ids": [2],
        "ignore_eos": True,
        "logprobs": 3,
        "structured_outputs": {"choice": ["a", "b"]},
    }
    assert expected.items() <= call.body.items()


async def test_vllm_request_to_the_generate_endpoint_has_sampling_params() -> None:
    call = (await vllm(scale_out=True)).call(ASKED, "id")
    assert call.path == "/inference/v1/generate"
    assert (call.body["token_ids"], call.body["model"]) == (list(range(10)), "poet")
    sampling = call.body["sampling_params"]
    assert (sampling["max_tokens"], sampling["detokenize"]) == (7, False)
    assert sampling["logprobs"] == 4, "one more, because the chosen token occupies one entry"


async def test_vllm_request_without_adapter_names_the_servers_own_model() -> None:
    assert (await vllm()).call(request(), "id").body["model"] == "tiny"


def read(reader_of: Any, asked: GenerateRequest, events: Sequence[dict[str, Any]]) -> list[Delta]:
    stream = DeltaStream()
    reader = reader_of(asked, stream)
    deltas: list[Delta] = []
    for event in events:
        reader.take(event)
        deltas += stream.take()
    if not reader.ended:
        reader.close()
    return [*deltas, *([] if deltas and deltas[-1].finish_reason else stream.take())]


def chunk(*token_ids: int, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": list(token_ids), "finish_reason": finish, **more}]}


def usage(cached: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (chunk(8, finish="length"), (FinishReason.LENGTH, None)),
        (chunk(2, finish="stop", stop_reason=None), (FinishReason.STOP, 2)),
        (chunk(8, finish="stop", stop_reason=8), (FinishReason.STOP, 8)),
        (chunk(8, finish="stop", stop_reason="text"), (FinishReason.STOP, 8)),
    ],
)
async def test_vllm_stream_with_usage_reports_the_engines_cached_tokens(
    last: dict[str, Any], expected: tuple[FinishReason, int | None]
) -> None:
    first, second, end = read((await vllm()).reader, request(), [chunk(5, 6), last, usage(4)])
    assert (list(first.token_ids), first.cached_later, len(second.token_ids)) == ([5, 6], True, 1)
    assert not second.cached_later
    assert (end.finish_reason, end.stop_token_id) == expected
    assert end.usage == Usage(10, 3, 4)


async def test_vllm_stream_without_cached_tokens_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    dialect = await vllm()
    for _ in range(2):
        *_, end = read(dialect.reader, request(), [chunk(5, finish="length"), {"choices": [], "usage": {}}])
        assert end.usage == Usage(10, 1, None)
    assert caplog.text.count("--enable-prompt-tokens-details") == 1


async def test_vllm_stream_that_ends_without_usage_ends_the_request() -> None:
    assert read((await vllm()).reader, request(), [chunk(5, finish="length")])[-1].usage == Usage(10, 1, None)


async def test_vllm_that_reports_cached_tokens_leaves_out_none() -> None:
    dialect = await vllm()
    lasts: tuple[dict[str, Any], ...] = (usage(4), {"choices": [], "usage": {}})
    ends = [read(dialect.reader, request(), [chunk(5, finish="length"), last])[-1].usage for last in lasts]
    assert ends == [Usage(10, 1, 4), Usage(10, 1, 0)]


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "too long", "code": 400}}, ErrorKind.INVALID_ARGUMENT),
        ({"error": {"message": "boom", "code": 500}}, ErrorKind.INTERNAL),
        (chunk(5, finish="abort"), ErrorKind.STREAM_INCOMPLETE),
        (chunk(5, finish="error"), ErrorKind.INTERNAL),
        (chunk(5), ErrorKind.STREAM_INCOMPLETE),
    ],
)
async def test_vllm_stream_that_fails_raises_a_typed_error(event: dict[str, Any], kind: ErrorKind) -> None:
    with pytest.raises(SluiceError) as caught:
        read((await vllm()).reader, request(), [event])
    assert caught.value.kind is kind


COMPLETION_LOGPROBS = {
    "tokens": ["token_id:5"],
    "token_logprobs": [-1.5],
    "top_logprobs": [{"token_id:5": -1.5, "token_id:7": -0.5, "token_id:9": -9999.0}],
}
GENERATE_LOGPROBS = {
    "content": [
        {
            "token_id": 5,
            "logprob": -1.5,
            "rank": 2,
            "top_logprobs": [{"token_id": 5, "logprob": -1.5, "rank": 2}, {"token_id": 7, "logprob": -0.5, "rank": 1}],
        }
    ]
}


@pytest.mark.parametrize("logprobs", [COMPLETION_LOGPROBS, GENERATE_LOGPROBS], ids=["completions", "generate"])
async def test_vllm_logprobs_of_both_endpoints_are_read_by_token_id(logprobs: dict[str, Any]) -> None:
    first, _ = read((await vllm()).reader, request(logprobs=2), [chunk(5, finish="length", logprobs=logprobs)])
    best = (TokenLogprob(7, -0.5, 1), TokenLogprob(5, -1.5, 2))
    assert list(first.logprobs) == [PositionLogprobs(TokenLogprob(5, -1.5, 2), best)]


SERVER_INFO = {"page_size": 4, "max_total_num_tokens": 400, "max_req_input_len": 60, "dp_size": 2, "version": "0.5.23"}
MODEL_INFO = {"model_path": "/m", "served_model_name": "tiny", "tokenizer_path": "/t", "is_generation": True}


async def test_sglang_server_is_described_by_its_own_information() -> None:
    paths = {"/model_info": MODEL_INFO, "/server_info": SERVER_INFO, "/v1/models": MODELS}
    described = await sglang.SglangDialect().describe(served_by(paths))
    assert (described.model, described.source, described.version) == ("tiny", "/t", "0.5.23")
    assert (described.context_length, described.block_size, described.total_blocks) == (61, 4, 100)
    assert (described.ranks, described.publishers) == (2, ())
    assert {"data_parallel_rank", "kv_events", "prompt_logprobs"} <= described.capabilities
    assert not {"seed", "priority", "lora", "sleep", "prefill", "embeddings"} & described.capabilities
    assert described.accepted == {"seed"}


async def test_sglang_server_of_an_older_version_is_described_by_the_older_paths() -> None:
    paths = {"/get_model_info": MODEL_INFO, "/get_server_info": SERVER_INFO, "/v1/models": MODELS}
    assert (await sglang.SglangDialect().describe(served_by(paths))).model == "tiny"


@pytest.mark.parametrize(
    ("model", "info"),
    [({"is_generation": False}, {}), ({}, {"disaggregation_mode": "prefill"})],
    ids=["embeds", "half"],
)
async def test_sglang_server_that_serves_no_complete_generations_is_rejected(
    model: dict[str, Any], info: dict[str, Any]
) -> None:
    paths = {"/model_info": MODEL_INFO | model, "/server_info": SERVER_INFO | info, "/v1/models": MODELS}
    with pytest.raises(SluiceError) as caught:
        await sglang.SglangDialect().describe(served_by(paths))
    assert caught.value.kind is ErrorKind.FAILED_PRECONDITION


def sglang_chunk(ids: list[int], completed: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {"completion_tokens": completed, "cached_tokens": 4, "finish_reason": finish},
    }


@pytest.mark.parametrize("ids", [[[5], [5, 6]], [[5], [6]]], ids=["cumulative", "incremental"])
def test_sglang_stream_in_both_modes_gives_each_token_once(ids: list[list[int]]) -> None:
    events = [sglang_chunk(ids[0], 1), sglang_chunk(ids[1], 2, {"type": "length"})]
    first, second, end = read(sglang.SglangDialect().reader, request(), events)
    assert [*first.token_ids, *second.token_ids] == [5, 6]
    assert (first.cached_tokens, end.usage) == (4, Usage(10, 2, 4))


def test_sglang_stream_with_an_error_raises_it() -> None:
    with pytest.raises(SluiceError, match="too long"):
        read(sglang.SglangDialect().reader, request(), [{"error": {"message": "too long", "code": 400}}])


def test_sglang_publishers_have_a_port_for_each_rank() -> None:
    described = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 5560,
        "topic": "kv",
        "dp_size": 2,
    }
    assert sglang.publishers(described) == (
        Publisher(0, "tcp://*:5557", "tcp://*:5560", "kv"),
        Publisher(1, "tcp://*:5558", "tcp://*:5561", "kv"),
    )
    assert sglang.publishers(None) == ()


@pytest.mark.parametrize(
    ("options", "reported", "expected"),
    [
        ({}, [Publisher(0, "tcp://*:5557", "tcp://*:5558", "kv")], [("tcp://h:5557", "tcp://h:5558")]),
        ({}, [Publisher(0, "tcp://h:5557")], [("tcp://h:5557", "")]),
        ({}, [Publisher(0, "tcp://H:5557", "tcp://0.0.0.0:5558")], [("tcp://h:5557", "tcp://h:5558")]),
        ({}, [Publisher(0, "tcp://10.0.0.9:5557")], "cannot be reached at the server's own host h"),
        ({}, [Publisher(0, "tcp://*:5557", "tcp://10.0.0.9:5558")], "replay endpoint"),
        ({}, [Publisher(0, "tcp://169.254.169.254:80")], "cannot be reached"),
        ({}, [Publisher(0, "tcp://*:22")], "from port 1024 on"),
        ({}, [Publisher(0, "tcp://127.0.0.1:5557")], "cannot be reached"),
        ({}, [Publisher(0, "tcp://*:5557;tcp://x:1")], "cannot be reached"),
        ({}, [Publisher(0, "inproc://x")], "cannot be reached"),
        ({}, [Publisher(0, "tcp://*:99999")], "cannot be reached"),
        ({}, [Publisher(0, "ipc:///run/kv")], "cannot be reached at the server's own host"),
        ({}, [], "start it with --kv-events-config"),
        ({"kv_events": "off"}, [Publisher(0, "tcp://*:5557")], "The option kv_events is off."),
        (
            {"kv_events": "tcp://x:1", "kv_replay": "tcp://x:5"},
            [],
            [("tcp://x:1", "tcp://x:5"), ("tcp://x:2", "tcp://x:6")],
        ),
    ],
)
def test_publishers_to_follow_come_from_the_options_or_the_server(
    options: dict[str, Any], reported: list[Publisher], expected: Any
) -> None:
    found, problem = chosen_publishers(HttpOptions("http://h:1", **options), reported, 2)
    if isinstance(expected, str):
        assert not found
        assert expected in problem
    else:
        assert [(one.endpoint, one.replay) for one in found] == expected


def test_publishers_on_a_loopback_server_may_be_sockets() -> None:
    reported = [Publisher(0, "ipc:///run/kv")]
    assert chosen_publishers(HttpOptions("http://127.0.0.1:1"), reported, 1) == (reported, "")


@pytest.mark.parametrize(
    ("engine_size", "flags", "expected"),
    [
        (16, (), 16),
        (1, (), 16),
        (12, (), 24),
        (256, (), 256),
        (0, (), 0),
        (16, (32,), 32),
        (32, (16,), 16),
        (0, (8,), 8),
    ],
)
def test_block_size_is_the_engines_or_the_declared_one(engine_size: int, flags: tuple[int, ...], expected: int) -> None:
    argv = [word for size in flags for word in ("--block-size", str(size))]
    assert card.block_size(WorkerSettings.load(argv), engine_size) == expected


def test_block_size_declared_incompatible_with_the_engines_is_rejected() -> None:
    with pytest.raises(SluiceError, match="the engine's blocks have 32 tokens") as caught:
        card.block_size(WorkerSettings.load(["--block-size", "24"]), 32)
    assert caught.value.param == "block_size"


def test_metrics_with_malformed_lines_are_read_around_them() -> None:
    content = (
        b'# TYPE a gauge\na{engine="0"} 1.0\na{engine="1"} 2.0\na{engine="x 3\nab{engine="0"} 9\na{engine="0"} 4\n'
    )
    gauges = read_gauges(content, ("a", "b"))
    assert by_rank(gauges["a"], "engine") == {0: 5.0, 1: 2.0}
    assert gauges["b"] == []


async def test_vllm_loads_are_read_by_rank() -> None:
    metrics = (
        b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
        b'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="m"} 3.0\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
    )
    paths: dict[str, Any] = {"/metrics": metrics}
    dialect = await vllm(**paths)
    assert await dialect.loads(served_by(paths)) == [Load(2, 3, 25)]
    assert await dialect.loads(served_by({})) == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("", "url of the http engine is missing; set it to http://host:port"),
        ("url=http://h:1,speed=3", "has no option 'speed'"),
        ("url=http://h:1,kv_replay=tcp://h:2", "kv_replay of the http engine needs the option kv_events"),
        ("url=http://h:1,kv_events=h:2", "kv_events of the http engine is 'h:2', expected"),
        ("url=http://h:1,start_s=0", "start_s of the http engine must be a positive number"),
    ],
)
def test_options_that_are_invalid_are_named(args: str, expected: str) -> None:
    with pytest.raises(SluiceError, match=expected):
        read_http_options(WorkerSettings.load(["--engine-args", args]))


@pytest.mark.parametrize(
    "flags", [("--role", "prefill"), ("--adapters", "a=/x"), ("--", "--tensor-parallel-size", "2")]
)
def test_options_of_engines_that_the_worker_starts_are_rejected(flags: tuple[str, ...]) -> None:
    with pytest.raises(SluiceError):
        read_http_options(WorkerSettings.load(["--engine-args", "url=http://h:1", *flags]))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ErrorKind.INVALID_ARGUMENT),
        (401, ErrorKind.INTERNAL),
        (404, ErrorKind.NOT_FOUND),
        (413, ErrorKind.TOO_LARGE),
        (429, ErrorKind.OVERLOADED),
        (503, ErrorKind.OVERLOADED),
        (504, ErrorKind.RESPONSE_TIMEOUT),
        (500, ErrorKind.INTERNAL),
    ],
)
def test_error_status_of_the_server_becomes_a_typed_error(status: int, kind: ErrorKind) -> None:
    error = error_of(status, "reason\nand a traceback")
    assert error.kind is kind
    assert "traceback" not in error.message


async def test_client_with_an_oversized_response_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_RESPONSE_BYTES", 100)
    with pytest.raises(SluiceError, match="larger than"):
        await served_by({"/x": b"x" * 101}).get("/x")


async def test_client_with_an_oversized_event_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_EVENT_BYTES", 100)
    events = served_by({"/x": b"data: " + b"x" * 101}).events("/x", {}, {})
    with pytest.raises(SluiceError, match="larger than"):
        await anext(events)


async def test_client_reads_events_between_keep_alive_comments() -> None:
    content = b': ping\n\ndata: {"a":1}\n\ndata:{"a":2}\n\ndata: [DONE]\n\ndata: {"a":3}\n\n'
    assert [event["a"] async for event in served_by({"/x": content}).events("/x", {}, {})] == [1, 2]


async def test_client_sends_the_key_of_its_file_and_never_shows_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    seen: list[str] = []

    def answer(asked: httpx.Request) -> httpx.Response:
        seen.append(asked.headers["Authorization"])
        return httpx.Response(401, json={"error": "Unauthorized"})

    one = HttpClient("http://h:1", str(tmp_path / "key"), httpx.MockTransport(answer))
    with pytest.raises(SluiceError) as caught:
        await one.get("/v1/models")
    assert seen == ["Bearer s3cret"]
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("content", "why"), [(b"", "one key"), (b"a\nb", "one key"), ("ü".encode(), "not ASCII")])
def test_client_with_an_unusable_key_file_is_rejected(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(SluiceError, match=why):
        HttpClient("http://h:1", str(tmp_path / "key"))


def test_tokenizer_on_another_machine_must_be_named() -> None:
    settings = WorkerSettings.load([]).model_copy(update={"model": "tiny=/nowhere/tiny"})
    with pytest.raises(SluiceError, match=r"/nowhere/tiny does not exist\. Set --model NAME=SOURCE"):
        card.tokenizer_folder(settings)


def test_vocabulary_size_comes_from_the_models_files(tmp_path: Path) -> None:
    assert card.vocab_size(build_tiny_model(tmp_path / "tiny")) > 256
    assert card.vocab_size(tmp_path) == 0
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 7}}')
    assert card.vocab_size(tmp_path) == 7
