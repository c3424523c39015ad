"""Which prefill and decode workers can run the two halves of a request.

What a prefill worker hands over is in its engine's own form, and engines promise that form for one version only. So two
workers form a pair if they run the same engine in the same version. A worker that does not say what it runs is taken
at its operator's word.
"""

from __future__ import annotations


def handoff_form_of(engine: str, version: str) -> str:
    """Returns the form of what a worker hands over and takes; empty: unknown."""
    return f"{engine} {version}" if engine and version else ""


def can_hand_over(ours: str, theirs: str) -> bool:
    """Returns whether two workers can run the two halves of a request, as far as is known."""
    return ours == theirs or not ours or not theirs
