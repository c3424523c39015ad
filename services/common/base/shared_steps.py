"""Declares shared steps: functions in which rows of many streams share a message, a batch, a step or a write.

The rule of a shared step: what one row raises ends that row, with a typed error, and nothing else. The declaration
costs nothing when the function runs. `tests/security/test_security_shared_steps.py` lists the declared steps from the
source, requires a rig that injects failures into each one, and rejects undeclared loops in the modules where rows
meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def shared_step(name: str) -> Callable[[F], F]:
    """Declares the decorated function as a shared step and returns it unchanged.

    Args:
        name: unique, such as ``postprocess.serialize``; a literal, because tests read it from the source.
    """
    return _unchanged


def _unchanged(function: F) -> F:
    return function
