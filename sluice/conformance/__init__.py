"""The conformance kit: asks any worker, through nothing but its gRPC contract, to keep every clause of it."""

from sluice.conformance.kit import run, select
from sluice.conformance.patience import Patience
from sluice.conformance.rule import Report, Result, Rule, Verdict
from sluice.conformance.subject import Target
from sluice.conformance.watching import Watcher

__all__ = ["Patience", "Report", "Result", "Rule", "Target", "Verdict", "Watcher", "run", "select"]
