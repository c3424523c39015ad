"""Budgets for the contents of a request body."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.budgets import Budget
from services.common.media.parts import MediaLimits


@dataclass(frozen=True, slots=True)
class BodyBudgets:
    """Budgets of one body, checked before the bounded data is built or traversed.

    Attributes:
        values: values in the whole body, counted before parsing.
        list_items: items of each list or object without a more specific limit.
        schema_nodes: JSON values of all schemas together, including those of tools.
        schema_characters: characters of the names and strings in schemas.
        pattern_characters: characters of all regular expressions together, including those in schemas.
        grammar_characters: characters of a grammar, or of all texts of a choice.
        media: bounds on the media items of the messages.
    """

    values: Budget
    list_items: Budget
    schema_nodes: Budget
    schema_characters: Budget
    pattern_characters: Budget
    grammar_characters: Budget
    media: MediaLimits = field(default_factory=MediaLimits)


class BodySettings(BaseSettings):
    """Bounds on request bodies beyond their size."""

    max_body_values: int = Field(
        2_000_000,
        ge=1_000,
        description="maximum number of values in a request body, counted before parsing: numbers count 1, lists, "
        "objects and strings 10",
    )
    max_list_items: int = Field(
        10_000,
        ge=1,
        description="maximum length of a list in a request body, such as messages, input items, content parts",
    )
    max_schema_nodes: int = Field(
        50_000,
        ge=1,
        description="maximum number of JSON values in all schemas of a request, including those of its tools",
    )
    max_schema_kb: int = Field(
        1024,
        ge=1,
        description="maximum total length of the names and strings in all schemas of a request, Ki characters",
    )
    max_pattern_kb: int = Field(
        16,
        ge=1,
        description="maximum total length of all regular expressions of a request, including those in schemas, "
        "Ki characters",
    )
    max_grammar_kb: int = Field(
        256, ge=1, description="maximum length of a grammar, or of all texts of a choice, in a request, Ki characters"
    )

    max_media_items: int = Field(
        MediaLimits().items, ge=0, le=1024, description="maximum number of images, audio clips and videos in a request"
    )
    max_media_mb: int = Field(
        7,
        ge=1,
        le=1024,
        description="maximum size of the file of one image, audio clip or video in a body, MiB; its base64 text takes "
        "4/3 of it and must fit into max-body-mb",
    )
    max_media_total_mb: int = Field(
        MediaLimits().total_bytes >> 20,
        ge=1,
        le=56,
        description="maximum size of all such files of a body together, MiB; they travel in one gRPC message of 64 MiB",
    )

    @property
    def budgets(self) -> BodyBudgets:
        """The budgets that these settings define."""
        return BodyBudgets(
            values=Budget("body_values", self.max_body_values, "--max-body-values"),
            list_items=Budget("list_items", self.max_list_items, "--max-list-items"),
            schema_nodes=Budget("schema_nodes", self.max_schema_nodes, "--max-schema-nodes"),
            schema_characters=Budget("schema_characters", self.max_schema_kb << 10, "--max-schema-kb"),
            pattern_characters=Budget("pattern_characters", self.max_pattern_kb << 10, "--max-pattern-kb"),
            grammar_characters=Budget("grammar_characters", self.max_grammar_kb << 10, "--max-grammar-kb"),
            media=MediaLimits(self.max_media_items, self.max_media_mb << 20, self.max_media_total_mb << 20),
        )
