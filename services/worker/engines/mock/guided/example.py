"""What generators of examples share."""

from __future__ import annotations


class OutOfReach(Exception):
    """No example can be made; the text says why, without a full stop."""
