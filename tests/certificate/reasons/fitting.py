"""Reasons that are the same for several engines, such as that Sluice fits conversations to templates."""

from __future__ import annotations

from tests.certificate.changes import with_messages, without_thoughts
from tests.certificate.comparison import Comparison, Verdict
from tests.certificate.explaining import Reason


def _drops(comparison: Comparison) -> bool:
    """Sluice's prompt has all words of the engine's, and more."""
    return bool(comparison.dropped) and not comparison.lost


def _shows_all(comparison: Comparison) -> bool:
    """Sluice's prompt has all words of the conversation."""
    return not comparison.missing


def keeps_words(comparison: Comparison) -> bool:
    """Sluice's prompt has all words of the engine's."""
    return not comparison.lost and comparison.fields == ("ids",)


def _prints_lists(comparison: Comparison) -> bool:
    """Only the engine's prompt shows a list."""
    return "[{'type': 'text'" in comparison.theirs and "[{'type': 'text'" not in comparison.ours and not comparison.lost


def same_words(comparison: Comparison) -> bool:
    """The prompts have the same words."""
    return not comparison.lost and not comparison.dropped and comparison.fields == ("ids",)


def fitting(engine: str, title: str) -> tuple[Reason, ...]:
    """Returns the reasons for one engine."""
    return (
        Reason(
            f"{title} drops what the template does not show",
            f"{title} passes on what the template leaves out of the prompt: a later system message, calls and "
            f"results, the "
            "developer's text. Sluice fits the conversation to the template, and the text is in the prompt.",
            "Sluice",
            engine,
            holds=_drops,
        ),
        Reason(
            f"{title} lets the template show a system message elsewhere",
            f"A template that shows a later system message at the beginning does so with {title}; Sluice keeps the "
            f"message at "
            "its place, within the user's next one.",
            "either",
            engine,
            features=("late system",),
            holds=same_words,
        ),
        Reason(
            f"{title} writes calls without tools",
            f"{title} writes calls in the template's form without tools in the request; Sluice writes them as text, "
            f"because this "
            "template does not always show them.",
            "either",
            engine,
            features=("calls without tools",),
            subjects=("llama-cpp-deepseek-r1",),
            holds=same_words,
        ),
        Reason(
            f"{title} returns the template's refusal",
            f"{title} refuses what the template refuses: an order of roles, an unknown role, an id of another length, "
            f"several "
            "calls at once. Sluice fits the conversation, and all of its text is in the prompt.",
            "Sluice",
            engine,
            verdict=Verdict.THEY_REFUSE,
            holds=_shows_all,
        ),
    )


def lists(engine: str, title: str) -> Reason:
    """Returns the reason of a list in a prompt."""
    return Reason(
        f"{title} prints a list",
        f"{title} passes parts to a template that takes a text at this place, and the prompt shows a list of Python; "
        f"Sluice "
        "passes the text.",
        "Sluice",
        engine,
        subjects=("google-gemma-4-*", "moonshotai-Kimi-K2"),
        holds=_prints_lists,
    )


def space_refused(engine: str, title: str) -> Reason:
    """Returns the reason of a message that ends with a space."""
    return Reason(
        f"{title} takes a last message that ends with a space",
        f"Anthropic's API refuses a message to continue that ends with white space, and so does Sluice; {title} "
        f"begins a new "
        "turn after it.",
        "Sluice",
        engine,
        apis=("messages",),
        features=("continued turn",),
        verdict=Verdict.WE_REFUSE,
        says="must not end with white space",
    )


def unread(engine: str, title: str) -> Reason:
    """Returns the reason of a field that no template reads."""
    return Reason(
        f"{title} does not pass on `reasoning`",
        f"{title} passes thoughts sent as `reasoning` under that name only; Sluice and vLLM also as "
        f"`reasoning_content`, which "
        "templates read.",
        "Sluice",
        engine,
        apis=("chat",),
        features=("reasoning",),
        change=with_messages(without_thoughts),
    )


def empty_turn(engine: str, title: str) -> Reason:
    """Returns the reason of a turn without text."""
    return Reason(
        f"{title} writes an empty turn",
        f"{title} writes a turn of the assistant without text as the template does; Sluice leaves it out where "
        f"the template "
        "takes none, and writes an empty text where the template has a mark for it.",
        "either",
        engine,
        features=("cut turn",),
        holds=same_words,
    )
