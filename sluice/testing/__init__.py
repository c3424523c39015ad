"""Helpers for the tests of engine authors: contexts, one request at a time, and the whole contract without ports.

docs/writing-an-engine.md shows them; `sluice.testing.fixtures` has them as pytest fixtures.
"""

from sluice.conformance import Report
from sluice.testing.engines import (
    ContractViolated,
    Output,
    cancelling_context,
    check,
    collect,
    mock_context,
    mock_request,
)

__all__ = [
    "ContractViolated",
    "Output",
    "Report",
    "cancelling_context",
    "check",
    "collect",
    "mock_context",
    "mock_request",
]
