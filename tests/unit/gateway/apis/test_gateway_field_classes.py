"""Every request field of the client libraries has a class: honoured, without effect, or refused with a reason."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from scripts.pages.fields import SCHEMAS, SDKS, rows
from services.gateway.apis.openai.unsupported_fields import (
    FieldClass,
    class_of,
    fields_without_effect,
    hint_field,
    neutral_values,
    no_effect_field,
    platform_field,
    unsupported_field,
)

HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Arguments of Anthropic's library that it sends as headers."""
LIBRARY_TYPES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsNonStreaming),
    ("/v1/chat/completions", chat_create_params.CompletionCreateParamsStreaming),
    ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming),
    ("/v1/embeddings", embedding_create_params.EmbeddingCreateParams),
    ("/v1/responses", response_create_params.ResponseCreateParamsStreaming),
    ("/v1/messages", message_create_params.MessageCreateParamsStreaming),
    ("/v1/messages", beta_message_create_params.MessageCreateParamsStreaming),
]


class Options(BaseModel):
    """Nested options."""

    hinted: str | None = hint_field()
    unused: str | None = no_effect_field("a reason", "medium")


class Example(BaseModel):
    """One field of each class."""

    honoured: int | None = None
    ignored: Any = no_effect_field("a reason", False)
    platform: int | None = platform_field(ge=1)
    refused: Any = unsupported_field("a reason", 0)
    options: Options | None = None


@pytest.mark.parametrize(("path", "library_type"), LIBRARY_TYPES)
def test_every_field_of_the_client_libraries_has_a_class(path: str, library_type: Any) -> None:
    fields = {name for name, _ in rows(SCHEMAS[path])}
    assert (library_type.__required_keys__ | library_type.__optional_keys__) - HEADERS <= fields


@pytest.mark.parametrize("library", SDKS)
def test_documented_version_of_a_client_library_is_the_tested_one(library: str) -> None:
    assert version(library) in SDKS[library]


def test_class_of_a_field_is_the_declared_one() -> None:
    found = {name: class_of(field) for name, field in rows(Example)}
    assert found == {
        "honoured": FieldClass.HONOURED,
        "ignored": FieldClass.NO_EFFECT,
        "platform": FieldClass.PLATFORM,
        "refused": FieldClass.REFUSED,
        "options": FieldClass.HONOURED,
        "options.hinted": FieldClass.HINT,
        "options.unused": FieldClass.NO_EFFECT,
    }


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ({}, []),
        ({"ignored": None, "options": {"unused": None}}, []),
        ({"ignored": False, "options": {"unused": "medium"}}, []),
        ({"ignored": 0}, ["ignored"]),
        ({"ignored": "", "platform": 1, "options": {"unused": "low", "hinted": "x"}}, ["ignored", "options.unused"]),
    ],
)
def test_fields_without_effect_are_reported_unless_neutral(body: dict[str, Any], reported: list[str]) -> None:
    assert fields_without_effect(Example.model_validate(body)) == reported


@pytest.mark.parametrize("path", SCHEMAS)
def test_every_field_without_effect_or_refused_states_a_reason(path: str) -> None:
    for name, field in rows(SCHEMAS[path]):
        _, neutral = neutral_values(field)
        assert neutral is None or (str(field.description).partition(": ")[2] and None in neutral), name
