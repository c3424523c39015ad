"""Ends templates that run too long: every turn of a loop and every macro call looks at the clock.

Jinja knows no such limit, and a template that emits nothing gives no other place to look. What takes long inside a
single expression is not reached; `template_process` is for templates from which that must be expected.
"""

from __future__ import annotations

from threading import local
from time import monotonic
from typing import cast

from jinja2 import nodes

TICK, KEPT = "sluice_tick", "sluice_kept"
"""Filters of the environment: one looks at the clock, one at the size of what is assigned. A filter is called
directly, where any other call would go through the sandbox first."""


class TemplateTimeout(Exception):
    """The template has run longer than it may."""


class Clock(local):
    """When the template that runs on this thread has to end, in `time.monotonic` seconds."""

    deadline = float("inf")

    def tick(self) -> None:
        """Raises Overtime when the time is up."""
        if monotonic() > self.deadline:
            raise TemplateTimeout


def watched(tree: nodes.Template) -> nodes.Template:
    """The same template with a look at the clock where it could run on, and at what it keeps in variables."""
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(loop, nodes.For | nodes.Macro | nodes.CallBlock)
        loop.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(None), TICK), lineno=loop.lineno))
    for assign in tree.find_all(nodes.Assign):
        assign.node = _filtered(assign.node, KEPT)
    for block in tree.find_all(nodes.AssignBlock):
        block.filter = _filtered(block.filter, KEPT)
    return tree


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr | None, node), name, [], [], None, None)
