"""Ends templates that run too long: every loop iteration and macro call checks the clock.

Jinja has no such limit, and a template that emits nothing offers no other place to check. A single slow expression is
not interrupted; templates that may contain one run in the processes of `templates.processes`.
"""

from __future__ import annotations

from threading import local
from time import monotonic
from typing import cast

from jinja2 import nodes

TICK, BOUND_VALUE = "sluice_tick", "sluice_bound_value"
"""Filters that check the clock and the size of assigned values; unlike other calls, filters bypass the sandbox."""


class TemplateTimeout(Exception):
    """The template exceeded its time limit."""


class Clock(local):
    """The deadline of the template running on this thread, in `time.monotonic` seconds."""

    deadline = float("inf")

    def tick(self) -> None:
        """Raises TemplateTimeout once the deadline has passed."""
        if monotonic() > self.deadline:
            raise TemplateTimeout


def instrumented(tree: nodes.Template) -> nodes.Template:
    """Returns the template with checks of the clock in loops and macros, and of the size of assigned values."""
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(loop, nodes.For | nodes.Macro | nodes.CallBlock)
        loop.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), TICK), lineno=loop.lineno))
    for assign in tree.find_all(nodes.Assign):
        assign.node = _filtered(assign.node, BOUND_VALUE)
    for block in tree.find_all(nodes.AssignBlock):
        block.filter = _filtered(block.filter, BOUND_VALUE)
    return tree


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr | None, node), name, [], [], None, None)
