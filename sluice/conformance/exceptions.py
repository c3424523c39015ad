"""What the checks of rules raise."""

from __future__ import annotations


class RuleFailed(Exception):
    """The worker violates the clause; the message describes the observed behaviour."""


class NotClaimed(Exception):
    """The card does not claim the capability of the rule; the message describes how the worker refuses it."""


class NotChecked(Exception):
    """The rule could not be run; the message states the reason and, if possible, what to change."""
