"""Request and response schemas of POST /v1/score, /v1/rerank and /v1/classify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from services.common.base.budgets import Budget
from services.gateway.apis.json_schemas import NON_EMPTY, any_of, closed_object
from services.gateway.apis.openai.embedding_schemas import MAX_INPUTS, PoolingFields, bounded_inputs
from services.gateway.apis.openai.fields import PromptInput, Strict
from services.gateway.apis.openai.response_schemas import Open
from services.gateway.apis.openai.unsupported_fields import unsupported_field

MAX_PAIR_CHARACTERS = 16 << 20
"""Characters of all pairs of a score or rerank request; more are refused, budget `pair_characters`."""
_PAIRS = Budget("pair_characters", MAX_PAIR_CHARACTERS, "")


class ClassifyRequest(PoolingFields):
    """POST /v1/classify."""

    input: Annotated[PromptInput, BeforeValidator(bounded_inputs)]

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


class Score(Open):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Open):
    """The scores of pairs of texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: dict[str, int]


class Relevance(Open):
    """A document and its relevance for the query."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Reranked(Open):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[Relevance]
    usage: dict[str, int]


class ClassOfText(Open):
    """The likeliest class of a text, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(Open):
    """The classes of texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassOfText]
    usage: dict[str, int]
