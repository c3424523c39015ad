"""How long the kit waits for what; a slow machine gets more of it, never a different contract."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines in seconds.

    Attributes:
        answer_s: a unary call that computes nothing.
        generation_s: a generation of a few dozen tokens, others beside it.
        cancel_s: from a cancel to the terminal delta.
        settle_s: until the engine's load shows that something ended, or an event has arrived.
        attach_s: until the worker registers with the kit, where the kit is its router.
        rule_s: everything that one rule does.
    """

    answer_s: float = 10.0
    generation_s: float = 60.0
    cancel_s: float = 2.0
    settle_s: float = 10.0
    attach_s: float = 15.0
    rule_s: float = 180.0

    def times(self, factor: float) -> Patience:
        """Every deadline `factor` times as long."""
        return Patience(
            answer_s=self.answer_s * factor,
            generation_s=self.generation_s * factor,
            cancel_s=self.cancel_s * factor,
            settle_s=self.settle_s * factor,
            attach_s=self.attach_s * factor,
            rule_s=self.rule_s * factor,
        )
