"""Request schemas of POST /v1/embeddings, /v1/score, /v1/rerank and /v1/classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from services.common.budgets import Budget
from services.gateway.apis.common.json_schemas import NON_EMPTY, any_of, closed_object
from services.gateway.apis.openai.fields import MAX_TOKEN_ID, Label, PromptInput, Strict
from services.gateway.apis.openai.unsupported_fields import platform_field, reject_unsupported, unsupported_field

MAX_INPUTS = 2_048
"""Inputs of an embeddings request, or texts of a score or rerank request; more are refused with INVALID_ARGUMENT."""
MAX_PAIR_CHARACTERS = 16 << 20
"""Characters of all pairs of a score or rerank request; more are refused, budget `pair_characters`."""
_PAIRS = Budget("pair_characters", MAX_PAIR_CHARACTERS, "")


def _inputs(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise ValueError(f"has {len(value)} inputs, more than {MAX_INPUTS}")
    return value


class PoolingFields(Strict):
    """The fields of every request whose texts a model turns into vectors."""

    model: str = Field(min_length=1)
    user: str | None = platform_field()
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    truncation_side: Literal["left", "right"] | None = None
    lora_path: str | None = Field(None, min_length=1, max_length=1024)
    request_id: Label | None = None
    rid: Label | None = None

    @model_validator(mode="after")
    def _truncates(self) -> PoolingFields:
        reject_unsupported(self)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for the context length")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise ValueError("truncation_side requires truncate_prompt_tokens")
        return self


class EmbeddingRequest(PoolingFields):
    """POST /v1/embeddings."""

    input: Annotated[PromptInput, BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=65_536)

    messages: Any = unsupported_field("send texts or token ids as input")
    chat_template: Any = unsupported_field("send texts or token ids as input")
    chat_template_kwargs: Any = unsupported_field("send texts or token ids as input")
    priority: Any = unsupported_field("embedding requests have no priorities", 0)
    cache_salt: Any = unsupported_field("embeddings do not use the prefix cache")
    padding: Any = unsupported_field("inputs are not padded", "do_not_pad")
    embed_dtype: Any = unsupported_field("values are float32", "float32")
    endianness: Any = unsupported_field("values are little-endian", "native", "little")
    use_activation: Any = unsupported_field("the model's files determine it")
    normalize: Any = unsupported_field("the model's files determine it")
    mm_processor_kwargs: Any = unsupported_field("only text input is accepted")


class ClassifyRequest(PoolingFields):
    """POST /v1/classify."""

    input: Annotated[PromptInput, BeforeValidator(_inputs)]

    messages: Any = unsupported_field("send texts or token ids as input")
    priority: Any = unsupported_field("classification requests have no priorities", 0)
    use_activation: Any = unsupported_field("values are probabilities", True)
    activation: Any = unsupported_field("values are probabilities", True)


def _check_pairs(text: str, others: Sequence[str], field: str) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) if a text is too long for as many others, before a pair is made."""
    characters = len(text) * len(others) + sum(map(len, others))
    _PAIRS.check(characters, f"The characters of all pairs, each of which repeats {field},", param=field)


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True)]


class ScoreRequest(PoolingFields):
    """POST /v1/score."""

    text_1: Text | Texts
    text_2: Text | Texts

    @model_validator(mode="after")
    def _pairs_up(self) -> ScoreRequest:
        first, second = self.pairs
        if len(first) not in (1, len(second)):
            raise ValueError("text_1 must have one text, or as many as text_2")
        if len(first) == 1:
            _check_pairs(first[0], second, "text_1")
        return self

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides as lists."""
        first, second = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        return first, second


class Document(Strict):
    """A document; a string stands for one with this text."""

    text: Text


def _document(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


_TEXT_OR_DOCUMENT = any_of(NON_EMPTY, closed_object({"text": NON_EMPTY}, "text"))
Documents = Annotated[
    list[Annotated[Document, BeforeValidator(_document), WithJsonSchema(_TEXT_OR_DOCUMENT)]],
    Field(min_length=1, max_length=MAX_INPUTS - 1, fail_fast=True),
]


class RerankRequest(PoolingFields):
    """POST /v1/rerank."""

    query: Text
    documents: Documents
    top_n: int | None = Field(None, ge=0, le=MAX_INPUTS)
    return_documents: bool | None = None

    max_tokens_per_doc: Any = unsupported_field("use truncate_prompt_tokens", 0)
    rank_fields: Any = unsupported_field("documents are texts")

    @model_validator(mode="after")
    def _repeats_the_query(self) -> RerankRequest:
        _check_pairs(self.query, self.texts, "query")
        return self

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [document.text for document in self.documents]
