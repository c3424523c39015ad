"""What a request body may hold and cost."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.budgets import Budget


@dataclass(frozen=True, slots=True)
class BodyBudgets:
    """The budgets of one body, checked before what they bound is built or walked through.

    Attributes:
        values: of the whole body, counted before it is parsed.
        list_items: of each list or object that has no limit of its own.
        schema_nodes: JSON values of all schemas together, those of tools among them.
        schema_characters: of their names and strings.
        pattern_characters: of all regular expressions together, those in schemas among them.
        grammar_characters: of a grammar, or of all texts of a choice.
    """

    values: Budget
    list_items: Budget
    schema_nodes: Budget
    schema_characters: Budget
    pattern_characters: Budget
    grammar_characters: Budget


class BodySettings(BaseSettings):
    """Bounds on request bodies beyond their size."""

    max_body_values: int = Field(
        2_000_000,
        ge=1_000,
        description="most values in a request body, counted before it is parsed: numbers count 1, lists, objects and "
        "strings 10",
    )
    max_list_items: int = Field(
        10_000, ge=1, description="longest list in a request body: messages, items of input, content parts, documents"
    )
    max_schema_nodes: int = Field(
        50_000, ge=1, description="most JSON values in all schemas of a request together, those of its tools among them"
    )
    max_schema_kb: int = Field(1024, ge=1, description="most characters of their names and strings, Ki")
    max_pattern_kb: int = Field(
        16, ge=1, description="most characters of all regular expressions of a request, those in schemas among them, Ki"
    )
    max_grammar_kb: int = Field(256, ge=1, description="longest grammar, or all texts of a choice, of a request, Ki")

    @property
    def budgets(self) -> BodyBudgets:
        """What these settings allow."""
        return BodyBudgets(
            values=Budget("body_values", self.max_body_values, "--max-body-values"),
            list_items=Budget("list_items", self.max_list_items, "--max-list-items"),
            schema_nodes=Budget("schema_nodes", self.max_schema_nodes, "--max-schema-nodes"),
            schema_characters=Budget("schema_characters", self.max_schema_kb << 10, "--max-schema-kb"),
            pattern_characters=Budget("pattern_characters", self.max_pattern_kb << 10, "--max-pattern-kb"),
            grammar_characters=Budget("grammar_characters", self.max_grammar_kb << 10, "--max-grammar-kb"),
        )
