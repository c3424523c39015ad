"""Constraints on the output: what comes out satisfies them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS
from sluice.conformance.refusals import unclaimed
from sluice.conformance.rule import NotChecked, expect, rule
from sluice.conformance.subject import Subject
from sluice.conformance.texts import text_reader
from sluice.v1 import common_pb2

STOP, LENGTH = REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
MOST_TOKENS = 200
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
    fits: Callable[[str], bool],
    begins: Callable[[str], bool],
) -> str:
    """One constrained generation: `fits` tells a text that was asked for, `begins` one that may still become it."""
    request = subject.request(max_tokens=MOST_TOKENS)
    request.guided.CopyFrom(guided)
    if not subject.claims(capability):
        await unclaimed(subject, request)
    read = await text_reader(subject)
    for attempt in range(ATTEMPTS if subject.claims(Capability.TEMPERATURE) else 1):
        if attempt:
            # The likeliest words of a model without training may be spaces for ever; chance gets it out of that.
            request.sampling.temperature = 1.0
            request.request_id = f"{request.request_id}-{attempt}"
        heard = await subject.ask(request)
        text = read(heard.token_ids)
        shown = text if len(text) < 80 else f"{text[:80]}…"
        expect(heard.reason in (STOP, LENGTH), f"It ended with {heard.describe()}.")
        if fits(text):
            return f"{shown!r} came out."
        expect(heard.reason == LENGTH and begins(text), f"{shown!r} came out, which is not what was asked for.")
    raise NotChecked(f"The output was not complete after {MOST_TOKENS} tokens: {shown!r}.")


@rule("guided-json", "With a JSON Schema the output is JSON that satisfies it.", "GuidedDecoding.json_schema")
async def guided_json(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(json_schema=json.dumps(SCHEMA))
    return await _constrained(subject, Capability.GUIDED_JSON, wanted, _is_the_object, _begins_an_object)


@rule("guided-regex", "With a regular expression the whole output matches it.", "GuidedDecoding.regex")
async def guided_regex(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(regex=REGEX)
    return await _constrained(
        subject, Capability.GUIDED_REGEX, wanted, lambda text: re.fullmatch(REGEX, text) is not None, _begins_a_match
    )


@rule("guided-choice", "With choices the output is one of them.", "GuidedDecoding.choice")
async def guided_choice(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(choice=common_pb2.GuidedDecoding.ChoiceList(choices=CHOICES))
    return await _constrained(
        subject, Capability.GUIDED_CHOICE, wanted, lambda text: text in CHOICES, _begins_one_of(*CHOICES)
    )


@rule("guided-grammar", "With a grammar the output is a sentence of it.", "GuidedDecoding.ebnf")
async def guided_grammar(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(ebnf=GRAMMAR)
    return await _constrained(
        subject, Capability.GUIDED_GRAMMAR, wanted, lambda text: text in SENTENCES, _begins_one_of(*SENTENCES)
    )


@rule("structural-tag", "With a structural tag the output has its structure.", "GuidedDecoding.structural_tag")
async def structural_tag(subject: Subject) -> str:
    wanted = common_pb2.GuidedDecoding(structural_tag=json.dumps(TAG))
    return await _constrained(
        subject, Capability.STRUCTURAL_TAG, wanted, lambda text: text == WORD, _begins_one_of(WORD)
    )


def _is_the_object(text: str) -> bool:
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


def _begins_an_object(text: str) -> bool:
    return text.strip()[:1] in ("", "{")


def _begins_a_match(text: str) -> bool:
    return _begins_one_of("red-", "green-")(text[:4]) and len(text) < len("green-000")


def _begins_one_of(*texts: str) -> Callable[[str], bool]:
    return lambda text: any(whole.startswith(text) for whole in texts)
