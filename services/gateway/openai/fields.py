"""Field types that OpenAI requests share. Types are strict, as in OpenAI's own API: "0.5" is no number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MAX_STOP_STRINGS = 1000
MAX_TOKEN_ID = 2**32 - 1
MAX_TOKEN_IDS = 131_072
MAX_BAD_WORDS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000
"""Of a request's priority, in both directions: what routers and engines sort by, clear of the workers' own probes."""


class Strict(BaseModel):
    """Types are as said, and fields nobody knows are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


def is_token_id(value: Any) -> bool:
    """Whether a value can be a token id; true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def text_or_tokens(value: Any) -> bool:
    """Whether a value has one of the forms that prompts and inputs of embeddings have."""
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    return (
        all(isinstance(part, str) for part in value)
        or all(map(is_token_id, value))
        or all(isinstance(part, list) and part and all(map(is_token_id, part)) for part in value)
    )


def one_by_one(value: Any) -> list[str | list[int]]:
    """A value of `text_or_tokens` as its single texts and lists of ids."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value[0], str | list) else [list(value)]


def _stop_strings(value: Any) -> Any:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError("must be a non-empty string or a list of non-empty strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(strings)} strings, more than {MAX_STOP_STRINGS}")
    return tuple(strings)


def _token_biases(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) and _is_decimal(key) for key in value):
        raise ValueError("must be an object from token ids to numbers")
    return {int(key): bias for key, bias in value.items()}


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _prompt(value: Any) -> Any:
    if not text_or_tokens(value):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    return value


def _json_object(value: Any) -> Any:
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


Label = Annotated[str, Field(max_length=512)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_NON_EMPTY = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}

StopStrings = Annotated[
    tuple[str, ...],
    BeforeValidator(_stop_strings),
    WithJsonSchema(
        {
            "anyOf": [
                _NON_EMPTY,
                {"type": "array", "items": _NON_EMPTY, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ],
            "default": None,
        }
    ),
]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_token_biases),
    Field(max_length=4096),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": 4096,
                },
                {"type": "null"},
            ],
            "default": None,
        }
    ),
]
PromptInput = Annotated[
    Any,
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                _IDS,
                {"type": "array", "minItems": 1, "items": _IDS},
            ]
        }
    ),
]
JsonObject = Annotated[dict[str, Any] | None, BeforeValidator(_json_object)]
