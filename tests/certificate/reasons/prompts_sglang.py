"""Reasons for other prompts of SGLang."""

from __future__ import annotations

from tests.certificate.changes import (
    deferred,
    developer_labelled,
    empty_cut_arguments,
    function_with,
    input_parts_joined,
    last_as_users,
    not_continued,
    parts_joined,
    systems_first,
    unswitched,
    with_messages,
    with_tools,
    without_thoughts,
)
from tests.certificate.comparison import Comparison, Verdict
from tests.certificate.explaining import Reason
from tests.certificate.plan import PromptCase
from tests.certificate.reasons.fitting import empty_turn, fitting, keeps_words, lists, space_refused, unread


def _tail_same(comparison: Comparison) -> bool:
    """Both prompts end with the message to continue, after the same words."""
    assert isinstance(comparison.case, PromptCase)
    tail = comparison.case.conversation.turns[-1].texts[-1].split()[-1]
    ends = [text.rstrip().endswith(tail) for text in (comparison.ours, comparison.theirs)]
    return all(ends) and not comparison.lost and not comparison.dropped


SGLANG = (
    Reason(
        "SGLang adds a field to tools",
        "SGLang writes `defer_loading: null` into every tool; Sluice writes what the client sent.",
        "Sluice",
        "sglang",
        change=with_tools(deferred),
    ),
    Reason(
        "SGLang adds fields to functions in Chat",
        "SGLang writes `description: null` into a tool without a description.",
        "Sluice",
        "sglang",
        apis=("chat",),
        features=("bare tools",),
        change=function_with({"description": None}),
    ),
    Reason(
        "SGLang adds fields to functions in Responses",
        "SGLang writes `strict: false` into every function, and `description: null` where there is none.",
        "Sluice",
        "sglang",
        apis=("responses",),
        change=function_with({"description": None, "strict": False}, ("name", "description")),
    ),
    Reason(
        "SGLang adds fields to functions in Messages",
        "SGLang writes `strict: false` into every function, and an empty description where there is none.",
        "Sluice",
        "sglang",
        apis=("messages",),
        change=function_with({"description": "", "strict": False}, ("name", "description")),
    ),
    Reason(
        "SGLang leaves thinking on in Messages",
        "Without `thinking`, SGLang leaves the template's switch for thinking unset; Sluice sets it to false, because "
        "that "
        "API thinks only when it is asked to.",
        "Sluice",
        "sglang",
        apis=("messages",),
        change=unswitched,
    ),
    Reason(
        "SGLang joins text parts by spaces",
        "SGLang joins the text parts of a message by spaces, Sluice and vLLM by line breaks.",
        "either",
        "sglang",
        features=("text parts",),
        apis=("chat",),
        change=parts_joined(" "),
    ),
    Reason(
        "SGLang joins blocks by spaces",
        "SGLang joins the text parts of a message of Responses and Messages by spaces, Sluice by line breaks.",
        "either",
        "sglang",
        apis=("responses", "messages"),
        features=("text parts",),
        body_change=input_parts_joined(" "),
    ),
    Reason(
        "SGLang begins a new turn in Responses",
        "SGLang does not continue the last message of the assistant in Responses, whatever its status.",
        "Sluice",
        "sglang",
        apis=("responses",),
        features=("continued turn",),
        change=not_continued,
    ),
    Reason(
        "SGLang takes the last message for the user's",
        "A last message of the assistant that is not to be continued becomes the user's with SGLang.",
        "Sluice",
        "sglang",
        features=("continued turn",),
        change=last_as_users,
    ),
    Reason(
        "SGLang merges system messages",
        "SGLang's Responses make one system message of all, at the beginning, where the template takes no later one.",
        "either",
        "sglang",
        apis=("responses",),
        change=with_messages(systems_first),
    ),
    Reason(
        "SGLang drops cut arguments",
        "SGLang replaces arguments of a call that are not JSON by `{}`; Sluice keeps their text.",
        "Sluice",
        "sglang",
        features=("cut turn",),
        change=with_messages(empty_cut_arguments),
    ),
    Reason(
        "SGLang refuses cut arguments",
        "SGLang refuses a chat in which a call has arguments that are not JSON; Sluice keeps their text.",
        "Sluice",
        "sglang",
        apis=("chat",),
        features=("cut turn",),
        verdict=Verdict.THEY_REFUSE,
        says="function.arguments must be valid JSON",
    ),
    Reason(
        "SGLang labels the developer's messages",
        "SGLang's Responses write `Developer instructions:` before a developer's message.",
        "Sluice",
        "sglang",
        apis=("responses",),
        features=("developer",),
        change=with_messages(developer_labelled),
    ),
    Reason(
        "SGLang appends the continued message as it is",
        "SGLang appends the text of a continued message to the prompt of a new turn, which may begin with a mark of "
        "thoughts; "
        "Sluice and vLLM let the template write the message, which may strip spaces.",
        "either",
        "sglang",
        features=("continued turn",),
        holds=_tail_same,
    ),
    Reason(
        "SGLang has no thinking without a parser",
        "SGLang refuses `thinking` when the server has no reasoning parser, as here.",
        "either",
        "sglang",
        apis=("messages",),
        features=("thinking switch",),
        verdict=Verdict.THEY_REFUSE,
        says="not supported for models without a reasoning parser",
    ),
    Reason(
        "SGLang passes the developer's role on",
        "SGLang passes the role developer to templates that print any role; Sluice and vLLM pass system, which models "
        "know.",
        "Sluice",
        "sglang",
        apis=("chat",),
        features=("developer",),
        holds=keeps_words,
    ),
    Reason(
        "SGLang drops thoughts of Messages",
        "Without a reasoning parser, as here, SGLang drops the thinking blocks of earlier turns.",
        "either",
        "sglang",
        apis=("messages",),
        features=("reasoning",),
        change=with_messages(without_thoughts),
    ),
    Reason(
        "SGLang continues a turn that the template cannot write",
        "SGLang does not let the template write the message that is continued; Sluice and vLLM do, and the template "
        "fails.",
        "either",
        "sglang",
        apis=("chat",),
        features=("continued turn",),
        verdict=Verdict.WE_REFUSE,
        says="cannot assign attribute on non-namespace object",
    ),
    unread("sglang", "SGLang"),
    space_refused("sglang", "SGLang"),
    lists("sglang", "SGLang"),
    empty_turn("sglang", "SGLang"),
    *fitting("sglang", "SGLang"),
)
