"""Measures the schemas, patterns and grammars of a request before they are processed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.common.base.budgets import Budget
from services.gateway.http.body_budgets import BodyBudgets


class SchemaMeter:
    """Counts for one request; every method raises SluiceError(INVALID_ARGUMENT) if a budget is exceeded.

    `param` is the client's field that contains the measured value.
    """

    def __init__(self, budgets: BodyBudgets) -> None:
        self.budgets = budgets
        self._nodes = self._characters = self._patterns = 0

    def add_schema(self, document: dict[str, Any], param: str) -> None:
        """Adds a parsed JSON schema, or a document that contains schemas.

        Every JSON value counts, including those of `enum` and `default`.
        """
        max_nodes, max_characters = self.budgets.schema_nodes.limit, self.budgets.schema_characters.limit
        pending: list[Any] = [document]
        while pending:
            node = pending.pop()
            self._nodes += len(node)
            if self._nodes > max_nodes or self._characters > max_characters:
                break
            values = node
            if isinstance(node, dict):
                self._characters += sum(map(len, node))
                if "pattern" in node or "patternProperties" in node:
                    self._add_patterns_of(node, param)
                values = node.values()
            for value in values:
                if isinstance(value, str):
                    self._characters += len(value)
                elif isinstance(value, dict | list):
                    pending.append(value)
        self.check_nodes(self._nodes, param)
        _check(self.budgets.schema_characters, self._characters, "characters in JSON schemas", param)

    def add_pattern(self, pattern: str, param: str) -> None:
        """Adds a regular expression."""
        self._patterns += len(pattern)
        _check(self.budgets.pattern_characters, self._patterns, "characters in regular expressions", param)

    def check_text(self, schema: str, param: str) -> None:
        """Checks the length of a schema given as JSON text, before it is parsed."""
        _check(self.budgets.schema_characters, len(schema), "characters in JSON schemas", param)

    def check_nodes(self, nodes: int, param: str) -> None:
        """Checks a number of JSON values, such as that of a schema given as JSON text."""
        _check(self.budgets.schema_nodes, nodes, "values in JSON schemas", param)

    def check_grammar(self, texts: Iterable[str], param: str) -> None:
        """Checks the length of a grammar, or of all texts of a choice together."""
        _check(self.budgets.grammar_characters, sum(map(len, texts)), "characters in a grammar or choice", param)

    def _add_patterns_of(self, node: dict[str, Any], param: str) -> None:
        if isinstance(pattern := node.get("pattern"), str):
            self.add_pattern(pattern, param)
        if isinstance(schemas := node.get("patternProperties"), dict):
            for pattern in schemas:
                self.add_pattern(pattern, param)


def _check(budget: Budget, amount: int, unit: str, param: str) -> None:
    if amount > budget.limit:
        raise budget.refuse(
            f"Invalid value for {param}: the request has more than {budget.limit} {unit}, all fields together",
            param=param,
        )
