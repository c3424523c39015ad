"""All rules, with a module for each part of the contract."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.conformance.rule import Rule, registered
from sluice.conformance.rules import (
    adapters,
    bad_input,
    cache,
    cancelling,
    card,
    control,
    embeddings,
    ending,
    events,
    generation,
    guided,
    logprobs,
    media,
    operations,
    placement,
    prompts,
    repeating,
    roles,
    sampling,
    sharing,
)

__all__ = ["all_rules"]

# Importing a module registers its rules; a run follows this order.
MODULES = (
    card,
    generation,
    ending,
    repeating,
    sharing,
    cancelling,
    bad_input,
    sampling,
    logprobs,
    guided,
    prompts,
    media,
    embeddings,
    placement,
    adapters,
    cache,
    roles,
    control,
    events,
    operations,
)


def all_rules() -> Sequence[Rule]:
    """Returns all rules in the order of a run; those that stop the worker come last."""
    order = [module.__name__.rpartition(".")[2] for module in MODULES]
    return sorted(registered(), key=lambda rule: (rule.disturbs, order.index(rule.part)))
