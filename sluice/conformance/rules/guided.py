"""Rules about structured output: the output satisfies its constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked
from sluice.conformance.observed_stream import REASONS
from sluice.conformance.refusals import expect_unsupported
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.conformance.texts import text_reader
from sluice.v1 import common_pb2

STOP, LENGTH = REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
MAX_TOKENS = 200
"""Tokens in which the conformance kit expects a constrained output to be complete."""
ATTEMPTS = 5
CHOICES = ("apple", "pear", "a cherry")
COLOURS = ("red", "green", "blue")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": list(COLOURS)}, "ripe": {"type": "boolean"}},
    "required": ["colour", "ripe"],
    "additionalProperties": False,
}
REGEX = r"(red|green)-[0-9]{3}"
GRAMMAR = 'root ::= ("yes" | "no") "!"'
SENTENCES = ("yes!", "no!")
WORD = "sluice"
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": WORD}}


async def _constrained(
    subject: Subject,
    capability: Capability,
    guided: common_pb2.GuidedDecoding,
    is_valid: Callable[[str], bool],
    is_prefix: Callable[[str], bool],
) -> str:
    """Runs constrained generations until one is complete.

    Args:
        is_valid: whether a text satisfies the constraint.
        is_prefix: whether a text may be continued to one that does.
    """
    request = subject.request(max_tokens=MAX_TOKENS)
    request.guided.CopyFrom(guided)
    if not subject.claims(capability):
        await expect_unsupported(subject, request)
    read = await text_reader(subject)
    for attempt in range(ATTEMPTS if subject.claims(Capability.TEMPERATURE) else 1):
        if attempt:
            # Greedy output of an untrained model may be whitespace forever; sampling avoids that.
            request.sampling.temperature = 1.0
            request.request_id = f"{request.request_id}-{attempt}"
        stream = await subject.complete(request)
        text = read(stream.token_ids)
        shown = text if len(text) < 80 else f"{text[:80]}…"
        expect(stream.reason in (STOP, LENGTH), f"The request ended with {stream.describe()}.")
        if is_valid(text):
            return f"The output is {shown!r}."
        expect(stream.reason == LENGTH and is_prefix(text), f"The output {shown!r} violates the constraint.")
    raise NotChecked(f"The output was not complete after {MAX_TOKENS} tokens: {shown!r}.")


@rule("guided-json", "With a JSON Schema, the output is JSON that satisfies it.", "GuidedDecoding.json_schema")
async def guided_json(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(json_schema=json.dumps(SCHEMA))
    return await _constrained(subject, Capability.GUIDED_JSON, wanted, _matches_schema, _is_object_prefix)


@rule("guided-regex", "With a regular expression, the complete output matches it.", "GuidedDecoding.regex")
async def guided_regex(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(regex=REGEX)
    return await _constrained(
        subject, Capability.GUIDED_REGEX, wanted, lambda text: re.fullmatch(REGEX, text) is not None, _is_regex_prefix
    )


@rule("guided-choice", "With choices, the output is one of them.", "GuidedDecoding.choice")
async def guided_choice(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(choice=common_pb2.GuidedDecoding.ChoiceList(choices=CHOICES))
    return await _constrained(
        subject, Capability.GUIDED_CHOICE, wanted, lambda text: text in CHOICES, _is_prefix_of(*CHOICES)
    )


@rule("guided-grammar", "With a grammar, the output is a sentence of it.", "GuidedDecoding.ebnf")
async def guided_grammar(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(ebnf=GRAMMAR)
    return await _constrained(
        subject, Capability.GUIDED_GRAMMAR, wanted, lambda text: text in SENTENCES, _is_prefix_of(*SENTENCES)
    )


@rule("structural-tag", "With a structural tag, the output has its structure.", "GuidedDecoding.structural_tag")
async def structural_tag(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(structural_tag=json.dumps(TAG))
    return await _constrained(
        subject, Capability.STRUCTURAL_TAG, wanted, lambda text: text == WORD, _is_prefix_of(WORD)
    )


def _matches_schema(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and set(found) == {"colour", "ripe"}
        and found["colour"] in COLOURS
        and isinstance(found["ripe"], bool)
    )


def _is_object_prefix(text: str) -> bool:
    return text.strip()[:1] in ("", "{")


def _is_regex_prefix(text: str) -> bool:
    return _is_prefix_of("red-", "green-")(text[:4]) and len(text) < len("green-000")


def _is_prefix_of(*texts: str) -> Callable[[str], bool]:
    return lambda text: any(candidate.startswith(text) for candidate in texts)
