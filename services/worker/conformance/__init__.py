"""The conformance kit: asks any worker, through nothing but its gRPC contract, to keep every clause of it."""

from services.worker.conformance.kit import run, select
from services.worker.conformance.patience import Patience
from services.worker.conformance.rule import Report, Result, Rule, Verdict
from services.worker.conformance.subject import Target
from services.worker.conformance.watching import Watcher

__all__ = ["Patience", "Report", "Result", "Rule", "Target", "Verdict", "Watcher", "run", "select"]
