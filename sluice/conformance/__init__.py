"""The conformance kit: tests whether a worker keeps every clause of the gRPC contract, using only its RPCs."""

from sluice.conformance.kit import run, select
from sluice.conformance.patience import Patience
from sluice.conformance.rule import Report, Result, Rule, Verdict
from sluice.conformance.subject import Target
from sluice.conformance.watching import Watcher

__all__ = ["Patience", "Report", "Result", "Rule", "Target", "Verdict", "Watcher", "run", "select"]
