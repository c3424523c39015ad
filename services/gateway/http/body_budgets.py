"""Budgets for the contents of a request body."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.common.base.budgets import Budget
from services.common.types.media.parts import MediaLimits

MAX_VALUES = 2_000_000
"""Values of a request body: numbers count 1, lists, objects and strings 10; refused, budget `body_values`."""
MAX_LIST_ITEMS = 10_000
"""Items of a list or object without a more specific limit; refused, budget `list_items`."""
MAX_SCHEMA_NODES = 50_000
"""JSON values of all schemas of a request, including those of tools; refused, budget `schema_nodes`."""
MAX_SCHEMA_CHARACTERS = 1 << 20
"""Characters of the names and strings in all schemas of a request; refused, budget `schema_characters`."""
MAX_PATTERN_CHARACTERS = 16 << 10
"""Characters of all regular expressions of a request, schemas included; refused, budget `pattern_characters`."""
MAX_GRAMMAR_CHARACTERS = 256 << 10
"""Characters of a grammar, or of all texts of a choice; refused, budget `grammar_characters`."""
MAX_CHOICE_BYTES = 32 << 20
"""Bytes of the options and prompts that all choices of a request are sent; refused, budget `choice_bytes`."""


@dataclass(frozen=True, slots=True)
class BodyBudgets:
    """Budgets of one body, checked before the bounded data is built or traversed.

    Attributes:
        values: values in the whole body, counted before parsing: numbers count 1, lists, objects and strings 10.
        list_items: items of each list or object without a more specific limit.
        schema_nodes: JSON values of all schemas together, including those of tools.
        schema_characters: characters of the names and strings in schemas.
        pattern_characters: characters of all regular expressions together, including those in schemas.
        grammar_characters: characters of a grammar, or of all texts of a choice.
        choice_bytes: bytes of the options and prompts that all choices of a request are sent.
        media: bounds on the media items of the messages.
    """

    values: Budget = field(default_factory=lambda: Budget("body_values", MAX_VALUES, ""))
    list_items: Budget = field(default_factory=lambda: Budget("list_items", MAX_LIST_ITEMS, ""))
    schema_nodes: Budget = field(default_factory=lambda: Budget("schema_nodes", MAX_SCHEMA_NODES, ""))
    schema_characters: Budget = field(default_factory=lambda: Budget("schema_characters", MAX_SCHEMA_CHARACTERS, ""))
    pattern_characters: Budget = field(default_factory=lambda: Budget("pattern_characters", MAX_PATTERN_CHARACTERS, ""))
    grammar_characters: Budget = field(default_factory=lambda: Budget("grammar_characters", MAX_GRAMMAR_CHARACTERS, ""))
    choice_bytes: Budget = field(default_factory=lambda: Budget("choice_bytes", MAX_CHOICE_BYTES, ""))
    media: MediaLimits = field(default_factory=MediaLimits)
