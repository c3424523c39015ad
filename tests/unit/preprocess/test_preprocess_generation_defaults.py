from __future__ import annotations

import logging
from typing import Any

import pytest

from services.preprocess.generation_defaults import NO_DEFAULTS, GenerationDefaults, generation_defaults


def test_what_the_file_sets_is_read_and_the_rest_is_unset() -> None:
    file = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    assert generation_defaults({**file, "max_new_tokens": 2048, "do_sample": False, "eos_token_id": 2}) == (
        GenerationDefaults(0.6, 0.95, 20, 0.0, 1.05, 2048)
    )
    assert generation_defaults({"top_k": 0}) == GenerationDefaults(top_k=0)
    assert generation_defaults({}) == NO_DEFAULTS


@pytest.mark.parametrize(
    "file",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 2.5},
        {"top_k": 1 << 40},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
)
def test_what_no_engine_could_honour_is_left_out_and_said_so(
    file: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert generation_defaults(file) == NO_DEFAULTS
    assert "out of range" in caplog.text
    assert caplog.records[0].__dict__["option"] in file
