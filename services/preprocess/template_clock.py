"""Ends templates that run too long: every turn of a loop and every macro call looks at the clock.

Jinja knows no such limit, and a template that emits nothing gives no other place to look. What takes long inside a
single expression is not reached; `template_process` is for templates from which that must be expected.
"""

from __future__ import annotations

from threading import local
from time import monotonic

from jinja2 import nodes

TICK = "tick"


class Overtime(Exception):
    """The template has run longer than it may."""


class Clock(local):
    """When the template that runs on this thread has to end, in `time.monotonic` seconds."""

    deadline = float("inf")

    def tick(self) -> None:
        """Raises Overtime when the time is up."""
        if monotonic() > self.deadline:
            raise Overtime


def look_at_clock(tree: nodes.Template) -> nodes.Template:
    """The same template with a call of the environment's `tick` where it could run on."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
        call = nodes.Call(nodes.EnvironmentAttribute(TICK), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
    return tree
