"""`--engine-args` in both forms, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ErrorKind, SluiceError
from services.worker.engines.shared.arguments import check_names, parse_engine_args, read_options


@dataclass(frozen=True, slots=True)
class Options:
    device: str = "cpu"
    threads: int | None = None
    share: float = 0.5
    eager: bool = False


def refusal(text: str) -> str:
    with pytest.raises(SluiceError) as caught:
        read_options(text, Options, "example")
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    return caught.value.message


def test_both_forms_say_the_same() -> None:
    short = read_options("device=cuda:0,threads=4,share=1,eager=true", Options, "example")
    full = read_options('{"device": "cuda:0", "threads": 4, "share": 1.0, "eager": true}', Options, "example")
    assert short == full == Options("cuda:0", 4, 1.0, True)


def test_dashes_are_underscores_and_nothing_is_nothing() -> None:
    assert parse_engine_args("--max-num-seqs=8,enforce-eager=true") == {"max_num_seqs": 8, "enforce_eager": True}
    assert parse_engine_args("  ") == {}
    assert read_options("", Options, "example") == Options()
    assert read_options("threads=null", Options, "example") == Options()


def test_nested_objects_survive() -> None:
    assert parse_engine_args('{"kv": {"a": [1, {"b": null}]}}') == {"kv": {"a": [1, {"b": None}]}}


def test_unknown_options_are_named_with_the_nearest_known_one() -> None:
    message = refusal("thread=4")
    assert "'thread'" in message
    assert "'threads'" in message
    assert "device, eager, share, threads" in refusal("zzz=1")


@pytest.mark.parametrize(
    "text",
    ["threads", "=1", '{"threads": 1', "[1]", "threads=1,threads=2", '{"threads": 1, "threads": 2}', "threads=few"],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    assert refusal(text)


def test_a_truth_value_is_no_number() -> None:
    assert "'threads'" in refusal("threads=true")
    assert "'share'" in refusal("share=true")


def test_names_are_checked_against_any_list() -> None:
    check_names({"a": 1}, ["a", "b"], "example")
    with pytest.raises(SluiceError):
        check_names({"c": 1}, ["a", "b"], "example")


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers() | st.booleans() | st.text()))
def test_any_json_object_is_read_as_it_is(options: dict[str, object]) -> None:
    named = {name: value for name, value in options.items() if name.strip("-_")}
    assert parse_engine_args(json.dumps(named)) == named


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(SluiceError):
        assert isinstance(parse_engine_args(text), dict)
