"""Reasons for other prompts of vLLM."""

from __future__ import annotations

from tests.certificate.changes import (
    arguments_first,
    empty_cut_arguments,
    function_with,
    not_continued,
    parts_joined,
    switched_on,
    system_blocks_joined,
    unswitched,
    with_effort_none,
    with_messages,
    without_thinking_name,
)
from tests.certificate.comparison import Verdict
from tests.certificate.explaining import Reason
from tests.certificate.reasons.fitting import empty_turn, fitting, lists, same_words, space_refused

VLLM = (
    Reason(
        "vLLM adds fields to tools",
        "vLLM writes `description: null` into a tool without a description; Sluice writes what the client sent.",
        "Sluice",
        "vllm",
        features=("bare tools",),
        change=function_with({"description": None}, ("name", "description")),
    ),
    Reason(
        "vLLM leaves thinking on in Messages",
        "Without `thinking`, vLLM leaves the template's switch for thinking unset; Sluice sets it to false, because "
        "that "
        "API thinks only when it is asked to.",
        "Sluice",
        "vllm",
        apis=("messages",),
        change=unswitched,
    ),
    Reason(
        "vLLM switches thinking on for an effort in Messages",
        "With an effort and without `thinking`, vLLM sets `enable_thinking`; in Sluice only `thinking` does.",
        "Sluice",
        "vllm",
        apis=("messages",),
        features=("effort",),
        change=switched_on,
    ),
    Reason(
        "vLLM begins a new turn in Messages",
        "After a last message of the assistant, vLLM begins another turn; Sluice continues the message, as that API "
        "does.",
        "Sluice",
        "vllm",
        apis=("messages",),
        features=("continued turn",),
        change=not_continued,
    ),
    Reason(
        "vLLM sets one name of the switch",
        "For an effort vLLM sets `enable_thinking` and not `thinking`, which some templates read; Sluice and SGLang "
        "set both.",
        "Sluice",
        "vllm",
        features=("effort",),
        change=without_thinking_name,
    ),
    Reason(
        "vLLM drops cut arguments",
        "vLLM replaces arguments of a call that are not JSON by `{}`; Sluice keeps their text.",
        "Sluice",
        "vllm",
        features=("cut turn",),
        change=with_messages(empty_cut_arguments),
    ),
    Reason(
        "vLLM joins system blocks without a space",
        "vLLM joins the blocks of `system` with nothing between them, Sluice with a line break.",
        "Sluice",
        "vllm",
        apis=("messages",),
        features=("two systems",),
        body_change=system_blocks_joined(""),
    ),
    Reason(
        "vLLM switches thinking off by an effort",
        "For `thinking` of the type disabled, vLLM also passes an effort of `none` to the template.",
        "either",
        "vllm",
        apis=("messages",),
        features=("thinking switch",),
        change=with_effort_none,
    ),
    Reason(
        "vLLM writes arguments before names",
        "vLLM passes the fields of a call in another order than the client's, which a template shows that prints the "
        "call.",
        "Sluice",
        "vllm",
        change=with_messages(arguments_first),
    ),
    Reason(
        "vLLM passes an empty text as a part",
        "vLLM passes an empty text as a part, which this template takes for text, and ends the turn after the tool's "
        "result.",
        "either",
        "vllm",
        features=("reasoning", "cut turn", "tools"),
        subjects=("google-gemma-4-31B-it",),
        holds=same_words,
    ),
    Reason(
        "vLLM cannot show parts with Mistral's tokenizers",
        "vLLM passes the parts of Responses to mistral-common, which does not know them; Sluice passes their text.",
        "Sluice",
        "vllm",
        apis=("responses",),
        subjects=("mistral-v*",),
        verdict=Verdict.THEY_REFUSE,
        says="is not a valid ChunkTypes",
    ),
    Reason(
        "vLLM joins parts for templates of Kimi K2",
        "vLLM does not see that these templates take parts and joins them by line breaks; Sluice and SGLang pass them.",
        "Sluice",
        "vllm",
        features=("text parts",),
        subjects=("Kimi-K2-*",),
        change=parts_joined("\n"),
    ),
    space_refused("vllm", "vLLM"),
    lists("vllm", "vLLM"),
    empty_turn("vllm", "vLLM"),
    *fitting("vllm", "vLLM"),
)
