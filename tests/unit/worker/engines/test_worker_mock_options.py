"""The options of the mock engine in --engine-args."""

from __future__ import annotations

import pytest

from services.common.base.errors import ErrorKind
from services.worker.engines.mock.options import Options, read
from tests.support.oracles.errors import raises_error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Options()),
        ("timing=fixed,fixed_step_ms=20", Options(timing="fixed", fixed_step_ms=20.0)),
        ("fault=error_after=3,media=image", Options(fault=("error_after=3",), media=("image",))),
        ('{"labels": ["good", "bad"], "data-parallel-size": 2}', Options(labels=("good", "bad"), data_parallel_size=2)),
    ],
)
def test_options_are_read_from_both_forms(text: str, expected: Options) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("timing=quick", "'quick' is not one of modelled, fixed, table"),
        ("fixed_step_ms=-1", "at least 0"),
        ("fixed_prefill_us=NaN", "at least 0"),
        ("data_parallel_size=65", "between 1 and 64"),
        ("media=smell", "'smell' is not one of image, audio, video"),
        ("media=3", "must be a list of texts, not 3"),
        ('{"labels": ["a", 1]}', "must be a list of texts"),
        ("falt=hang", "did you mean 'fault'"),
    ],
)
def test_invalid_option_is_refused_in_a_sentence(text: str, match: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="engine_args", match=match):
        read(text)


def test_more_labels_than_the_bound_are_refused() -> None:
    labels = ", ".join(f'"{number}"' for number in range(1_025))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, match="the maximum is 1024"):
        read(f'{{"labels": [{labels}]}}')
