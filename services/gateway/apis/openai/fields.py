"""Field types shared by the request schemas. Types are strict, as in OpenAI's API: "0.5" is not a number.

Lengths are validated before elements and validation stops at the first invalid element, so that rejecting a request
costs less than parsing it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from services.gateway.http.body_budgets import BodyBudgets

MAX_STOP_STRINGS = 1000
"""Stop strings of a request; more are refused with INVALID_ARGUMENT."""
MAX_TOKEN_ID = 2**32 - 1
"""Token id, or number of tokens, in a request; a larger one is refused with INVALID_ARGUMENT."""
MAX_TOKEN_IDS = 131_072
"""Token ids of `allowed_token_ids` and `nvext.token_data`; more are refused with INVALID_ARGUMENT."""
MAX_BAD_WORDS = 64
"""Texts of `bad_words`; more are refused with INVALID_ARGUMENT."""
MAX_LOGPROBS = 20
"""Alternatives of `top_logprobs` and `prompt_logprobs`; more are refused with INVALID_ARGUMENT."""
MAX_PRIORITY = 1000
"""Priority of a request, in both directions, as workers' probes have others; beyond it INVALID_ARGUMENT."""
MAX_BIASES = 4_096
"""Entries of `logit_bias`; more are refused with INVALID_ARGUMENT."""


def _model_may_be_left_out(schema: dict[str, Any]) -> None:
    """Documents that `model`, absent or null, is filled in where one model is served; see BodyReader."""
    if "model" in schema.get("required", ()):
        schema["required"].remove("model")
        schema["properties"]["model"] = {"anyOf": [schema["properties"]["model"], {"type": "null"}]}


class Strict(BaseModel):
    """Base of request schemas: strict types, and unknown fields are rejected."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        json_schema_extra=_model_may_be_left_out,
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: Any) -> Any:
        """Removes all but one unknown field of an object with too many fields, as each would create an error."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        names = [field.alias or name for name, field in cls.model_fields.items()]
        fields = {name: value[name] for name in names if name in value}
        unknown = next(name for name in value if name not in fields)
        return {**fields, unknown: value[unknown]}


def text_or_tokens(value: Any) -> bool:
    """Returns whether a value is text, token ids, or a list of either, as prompts and embedding inputs are."""
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    kinds = set(map(type, value))
    return kinds == {str} or are_token_ids(value) or (kinds == {list} and all(map(are_token_ids, value)))


def are_token_ids(values: list[Any]) -> bool:
    """Returns whether values are token ids, at least one; booleans do not count as numbers."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN_ID


def one_by_one(value: Any) -> list[str | list[int]]:
    """Splits a value accepted by `text_or_tokens` into single texts and lists of token ids."""
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value[0], str | list) else [list(value)]


def at_most(limit: int) -> BeforeValidator:
    """Returns a validator that rejects longer lists and objects before their elements are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"has {len(value)} items, more than {limit}")
        return value

    return BeforeValidator(check)


def within_list_items(value: Any, info: ValidationInfo) -> Any:
    """Rejects lists and objects that exceed the budget of list items; for top-level fields of the body.

    Raises:
        SluiceError: INVALID_ARGUMENT, through pydantic.
    """
    check_list_items(value, info.field_name or "", info)
    return value


def check_list_items(value: Any, param: str, info: ValidationInfo) -> None:
    """Rejects a value like `within_list_items`, for a value anywhere in the body.

    Args:
        param: the client's path of the value.
        info: of a validation with BodyBudgets as its context.
    """
    budgets = info.context
    assert isinstance(budgets, BodyBudgets)
    if isinstance(value, list | dict) and len(value) > budgets.list_items.limit:
        raise budgets.list_items.refuse(
            f"{param} has {len(value)} items, more than {budgets.list_items.limit}", param=param
        )


def _stop_strings(value: Any) -> Any:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(strings)} strings, more than {MAX_STOP_STRINGS}")
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError("must be a non-empty string or a list of non-empty strings")
    return tuple(strings)


def _token_biases(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) and _is_decimal(key) for key in value):
        raise ValueError("must be an object from token ids to numbers")
    return {int(key): bias for key, bias in value.items()}


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _prompt(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, list) and value and not isinstance(value[0], int):
        within_list_items(value, info)  # lists of token ids are bounded by the context instead
    if not text_or_tokens(value):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    return value


def _object(value: Any) -> Any:
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
    at_most(MAX_BIASES),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_BIASES,
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
JsonObject = Annotated[dict[str, Any] | None, BeforeValidator(_object), BeforeValidator(within_list_items)]
"""An object that is a top-level field of the body."""

SchemaObject = Annotated[dict[str, Any] | None, BeforeValidator(_object)]
"""A JSON schema; its size is bounded by `SchemaMeter`."""

Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], at_most(16), Field(max_length=16)]
