"""Requests in vLLM's words, its answers in ours, and its command line: all without vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import (
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
from services.worker.engines.vllm.handoff import Handoff, read_handoff
from services.worker.engines.vllm.options import command_line, flags, kv_events_config, named_adapters
from services.worker.engines.vllm.outputs import RequestState
from services.worker.engines.vllm.sampling import sampling_arguments
from services.worker.settings import WorkerSettings
from tests.support.oracles.errors import raises_error

FACTS = Facts(context_length=100)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest("r", "m", array("I", range(10)), **fields)


def mapped(facts: Facts = FACTS, **fields: Any) -> dict[str, Any]:
    return sampling_arguments(request(**fields), facts)


def test_unset_options_are_left_to_the_engine() -> None:
    assert mapped() == {"max_tokens": 90, "min_tokens": 0, "stop_token_ids": [], "ignore_eos": False}


def test_every_sampling_option_has_its_place() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        seed=7,
        logit_bias={5: 2.5},
        allowed_token_ids=(5, 6),
        bad_words=((5, 6), (7,)),
        thinking_token_budget=64,
        engine_options={"stream_interval": 4, "my_plugin": {"x": 1}},
    )
    assert mapped(sampling=sampling, logprobs=3, prompt_logprobs=0) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 7,
        "thinking_token_budget": 64,
        "logit_bias": {5: 2.5},
        "allowed_token_ids": [5, 6],
        "bad_words_token_ids": [[5, 6], [7]],
        "stream_interval": 4,
        "extra_args": {"my_plugin": {"x": 1}},
        "logprobs": 3,
        "prompt_logprobs": 0,
        "max_tokens": 90,
        "min_tokens": 0,
        "stop_token_ids": [],
        "ignore_eos": False,
    }


def test_the_models_defaults_fill_in_and_never_override() -> None:
    facts = Facts(100, {"temperature": 0.7, "top_k": 20, "max_tokens": 5})
    arguments = mapped(facts, sampling=SamplingParams(temperature=0.0))
    assert (arguments["temperature"], arguments["top_k"], arguments["max_tokens"]) == (0.0, 20, 90)


def test_lengths_stay_within_the_context() -> None:
    assert mapped(stop=StopParams(max_tokens=1_000))["max_tokens"] == 90
    assert mapped(stop=StopParams(max_tokens=7, min_tokens=3))["min_tokens"] == 3


def test_ignored_end_tokens_are_no_stop_tokens() -> None:
    stop = StopParams(stop_token_ids=frozenset({1, 2, 9}), eos_token_ids=(1, 2), ignore_eos=True)
    assert mapped(stop=stop)["stop_token_ids"] == [9]
    assert mapped(stop=StopParams(stop_token_ids=frozenset({2, 1})))["stop_token_ids"] == [1, 2]


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        (StructuredOutput("json_schema", "{}"), {"json": "{}"}),
        (StructuredOutput("json_object"), {"json_object": True}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}),
        (StructuredOutput("ebnf", "root ::= x"), {"grammar": "root ::= x"}),
        (StructuredOutput("choice", ("a", "b")), {"choice": ["a", "b"]}),
        (StructuredOutput("structural_tag", "{}"), {"structural_tag": "{}"}),
    ],
)
def test_constraints(guided: StructuredOutput, expected: dict[str, Any]) -> None:
    assert mapped(guided=guided)["structured_outputs"] == expected


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv_cache_report_mode", "n", "output_kind"])
def test_what_the_worker_decides_is_not_the_callers(name: str) -> None:
    with raises_error(match=name, param="engine_options"):
        mapped(sampling=SamplingParams(engine_options={name: "x"}))


def test_a_prefill_makes_one_token_and_keeps_its_blocks() -> None:
    arguments = mapped(stop=StopParams(max_tokens=50), disaggregation=Disaggregation(Role.PREFILL))
    assert arguments["max_tokens"] == 1
    assert arguments["extra_args"]["kv_transfer_params"]["do_remote_decode"] is True


def test_a_decode_goes_on_after_the_first_token() -> None:
    handoff = Handoff(77, {"remote_host": "h"})
    assert read_handoff(handoff.pack()) == handoff
    asked = request(stop=StopParams(max_tokens=50, min_tokens=4), disaggregation=Disaggregation(Role.DECODE))
    arguments = sampling_arguments(asked, FACTS, handoff)
    assert (arguments["max_tokens"], arguments["min_tokens"]) == (49, 3)
    assert arguments["extra_args"]["kv_transfer_params"] == {"remote_host": "h"}


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"format": "other", "token_id": 1, "transfer": {}}', Handoff(-1, {}).pack(), b"\xff\xfe"],
)
def test_a_broken_handoff_is_refused(data: bytes) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="disaggregation"):
        read_handoff(data)


class ObservedStream(Sink):
    """What a caller hears."""

    def __init__(self) -> None:
        self.cached: int | None = None
        self.prompt: Sequence[PositionLogprobs] = ()
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.ends: list[tuple[FinishReason, Usage, int | None, bytes]] = []
        self.errors: list[SluiceError] = []

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        assert self.cached is None
        self.cached, self.prompt = cached_tokens, prompt_logprobs

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        self.ends.append((reason, usage, stop_token_id, handoff))
        self.errors += [] if error is None else [error]


def output(token_ids: list[int], finish: str | None = None, stop: int | str | None = None, **fields: Any) -> Any:
    completion = SimpleNamespace(
        token_ids=token_ids, finish_reason=finish, stop_reason=stop, logprobs=fields.pop("logprobs", None)
    )
    known = {"num_cached_tokens": 4, "prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
    return SimpleNamespace(outputs=[completion], finished=finish is not None, **{**known, **fields})


def test_tokens_pass_and_the_end_comes_once() -> None:
    heard = ObservedStream()
    state = RequestState(10, heard, None, None)
    state.take(output([1, 2]))
    state.take(output([3], "stop", 3))
    state.take(output([4], "length"))
    state.end(FinishReason.CANCELLED)
    assert (heard.cached, heard.token_ids) == (4, [1, 2, 3])
    assert heard.ends == [(FinishReason.STOP, Usage(10, 3, 4), 3, b"")]


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "stop_token"),
    [
        ("length", None, FinishReason.LENGTH, None),
        ("stop", None, FinishReason.STOP, 9),
        ("abort", None, FinishReason.CANCELLED, None),
        ("error", None, FinishReason.ERROR, None),
    ],
)
def test_reasons(finish: str, stop: int | None, reason: FinishReason, stop_token: int | None) -> None:
    heard = ObservedStream()
    RequestState(10, heard, None, None).take(output([9], finish, stop))
    assert [(end[0], end[2]) for end in heard.ends] == [(reason, stop_token)]


@pytest.mark.parametrize("tokens", [[], [9]], ids=["before the first token", "later"])
@pytest.mark.parametrize("guided", [None, StructuredOutput("json_schema", "{}")], ids=["free", "constrained"])
def test_failure_before_the_first_token_of_constrained_output_is_the_constraints(
    guided: StructuredOutput | None, tokens: list[int]
) -> None:
    heard = ObservedStream()
    RequestState(10, heard, None, None, guided=guided).take(output(tokens, "error"))
    (error,) = heard.errors
    if guided is not None and not tokens:
        assert (error.kind, error.param, error.http_status) == (ErrorKind.INVALID_ARGUMENT, "response_format", 400)
    else:
        assert error.kind is ErrorKind.INTERNAL


def test_a_prefill_ends_with_a_handoff_unless_the_answer_ends_by_itself() -> None:
    heard, ended = ObservedStream(), ObservedStream()
    RequestState(10, heard, None, None, is_prefill=True).take(output([9], "length", kv_transfer_params={"host": "h"}))
    RequestState(10, ended, None, None, is_prefill=True).take(output([2], "stop", 2))
    assert heard.ends[0][0] is FinishReason.HANDOFF
    assert read_handoff(heard.ends[0][3]) == Handoff(9, {"host": "h"})
    assert ended.ends[0][0] is FinishReason.STOP


def entry(logprob: float, rank: int | None) -> Any:
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_log_probabilities_are_ranked_and_cut_and_finite() -> None:
    heard = ObservedStream()
    state = RequestState(2, heard, 2, 1)
    prompt = [None, {8: entry(-1.0, 3), 5: entry(-0.5, 1)}]
    found = {9: entry(float("-inf"), 7), 4: entry(-0.2, 2), 3: entry(-0.1, 1)}
    state.take(output([9], logprobs=[found], prompt_logprobs=prompt, prompt_token_ids=[7, 8]))
    assert heard.logprobs == [
        PositionLogprobs(TokenLogprob(9, -9999.0, 7), (TokenLogprob(3, -0.1, 1), TokenLogprob(4, -0.2, 2)))
    ]
    assert list(heard.prompt) == [
        PositionLogprobs(TokenLogprob(7, 0.0, 0)),
        PositionLogprobs(TokenLogprob(8, -1.0, 3), (TokenLogprob(5, -0.5, 1),)),
    ]


def settings(*argv: str) -> WorkerSettings:
    return WorkerSettings.load(["--engine", "vllm", "--model", "tiny=/models/tiny", *argv])


def test_explicit_settings_become_flags_before_engine_arguments() -> None:
    line = command_line(
        settings(
            *("--block-size", "32", "--engine-args", "enforce_eager=true,swap-space=0", "--max-sequences", "8"),
            *("--", "--kv-cache-dtype", "fp8"),
        ),
        "/models/tiny",
    )
    assert line == [
        *("--model", "/models/tiny", "--served-model-name", "tiny", "--block-size", "32", "--max-num-seqs", "8"),
        *("--enforce-eager", "--swap-space", "0", "--kv-cache-dtype", "fp8"),
    ]


def test_flags_of_every_kind() -> None:
    assert flags({"a_b": 1, "on": True, "off": False, "none": None, "many": [1, "x"], "tree": {"k": [1]}}) == [
        *("--a-b", "1", "--on", "--no-off", "--many", "1", "x", "--tree", '{"k": [1]}')
    ]


@pytest.mark.parametrize(
    "argv", [("--engine-args", "model=other"), ("--", "--model=other"), ("--", "--served-model-name", "x")]
)
def test_the_model_is_named_once(argv: tuple[str, ...]) -> None:
    with pytest.raises(SluiceError, match="--model"):
        command_line(settings(*argv), "/models/tiny")


def test_adapters_are_folders_with_names(tmp_path: Path) -> None:
    for name in ("tone", "style"):
        (tmp_path / name).mkdir()
    assert named_adapters([f"formal={tmp_path / 'tone'}", str(tmp_path / "style")]) == {
        "formal": str(tmp_path / "tone"),
        "style": str(tmp_path / "style"),
    }
    with pytest.raises(SluiceError, match="is not a folder"):
        named_adapters(["tone=/nowhere"])
    with pytest.raises(SluiceError, match="twice"):
        named_adapters([f"a={tmp_path / 'tone'}", f"a={tmp_path / 'style'}"])


def test_ranks_need_tcp() -> None:
    assert kv_events_config("/f", 1)["endpoint"] == "ipc:///f/events"
    assert kv_events_config("/f", 2)["endpoint"] == "tcp://*:0"
