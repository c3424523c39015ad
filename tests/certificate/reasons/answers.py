"""Reasons for other readings of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.certificate.comparison import Comparison
from tests.certificate.explaining import Reason
from tests.certificate.plan import ANSWERS as API
from tests.certificate.plan import AnswerCase
from tests.certificate.sides.side import Result

_WORD = re.compile(r"[^\W\d_]\w*")
_ESCAPE = re.compile(r"\\u[0-9a-f]{4}|\\.")
_WRITTEN = """
assistant constrain item ARGS CALL_ID THINK action answer arg arg_key arg_value argument arguments begin
call channel close end f falsestring function function_calls functions functools id index invoke
json key minimax name object open parameter parameters response sep start steptml string tool
tool_call tool_call_id tool_calls tool_name tool_sep tools true type DSML think thought e3
START_ACTION END_ACTION START_RESPONSE END_RESPONSE TOOL_CALLS python_start python_end python_tag
commentary tool_call_begin tool_call_end tool_calls_begin tool_calls_end tool_call_argument_begin
tool_calls_section_begin tool_calls_section_end calls section argument_begin false n
"""
_MARKUP = frozenset(_WRITTEN.split())
"""Words of the formats, which no user reads."""
_WHOLE = ("plain", "tools", "parallel calls", "reasoning")
_DAMAGED = ("cut answer", "recorded")


def _collapsed(result: Result) -> Result:
    return {**result, **{name: " ".join(result[name].split()) for name in ("content", "reasoning")}}


def _uncounted(result: Result) -> Result:
    return {**result, "reasoning_tokens": 0}


def _with_objects(result: Result) -> Result:
    return {**result, "calls": [[name, {} if arguments == "" else arguments] for name, arguments in result["calls"]]}


def _as_written(comparison: Comparison) -> bool:
    """Sluice reads in an answer what it was made of."""
    assert comparison.answers is not None
    assert isinstance(comparison.case, AnswerCase)
    ours, written = _collapsed(comparison.answers[0]), comparison.case.answer.written
    return written is not None and (
        (ours["content"], ours["reasoning"])
        == tuple(" ".join(text.split()) for text in (written.content, written.thoughts))
        and ours["calls"] == [list(call) for call in written.calls]
        and ours["finish"] == ("tool_calls" if written.calls else "stop")
    )


def _keeps_all(comparison: Comparison) -> bool:
    """Sluice's reading has every word that the engine's has and the answer wrote."""
    assert comparison.answers is not None
    assert isinstance(comparison.case, AnswerCase)
    ours, theirs = map(_words, comparison.answers)
    return ours >= theirs & set(_WORD.findall(_ESCAPE.sub(" ", comparison.case.answer.text))) - _MARKUP


def _words(result: Result) -> set[str]:
    calls = " ".join(text for call in result["calls"] for text in _texts(call))
    return set(_WORD.findall(" ".join((result["content"], result["reasoning"], calls))))


def _texts(value: Any) -> Iterator[str]:
    """All texts within a value, and the other values as JSON."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _of(engine: str, title: str) -> tuple[Reason, ...]:
    def reason(
        name: str,
        text: str,
        right: str,
        features: tuple[str, ...] = ("*",),
        normal: Callable[[Result], Result] | None = None,
        holds: Callable[[Comparison], bool] | None = None,
    ) -> Reason:
        return Reason(name, text, right, engine, (API,), features, normal=normal, holds=holds)

    return (
        reason(
            f"{title} keeps white space of answers",
            f"{title} keeps white space around thoughts, content and calls; Sluice leaves out line breaks that belong "
            f"to the "
            "format.",
            "either",
            normal=_collapsed,
        ),
        reason(
            f"{title} reads whole answers otherwise",
            f"{title}'s parser does not read in a whole answer the content, thoughts and calls of which it was made; "
            f"Sluice "
            "does.",
            "Sluice",
            _WHOLE,
            holds=_as_written,
        ),
        reason(
            f"{title} reads cut and wrong answers otherwise",
            f"Of an answer that is cut or whose calls are malformed, {title} drops or completes what cannot be read; "
            f"Sluice "
            "passes on every word, as content or as arguments.",
            "Sluice",
            _DAMAGED,
            holds=_keeps_all,
        ),
    )


ANSWERS: tuple[Reason, ...] = (
    *_of("vllm", "vLLM"),
    Reason(
        "vLLM sends no arguments",
        "vLLM sends no arguments of a call without any; Sluice sends `{}`, which is JSON.",
        "Sluice",
        "vllm",
        (API,),
        normal=_with_objects,
    ),
    Reason(
        "vLLM counts other tokens of thoughts",
        "vLLM counts the tokens between the markers of thoughts, or what its parser has seen of them; Sluice counts a "
        "token "
        "until it is known to be none.",
        "either",
        "vllm",
        (API,),
        normal=_uncounted,
    ),
    *_of("sglang", "SGLang"),
)
