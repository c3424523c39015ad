"""An engine for Sluice that repeats every prompt."""

from sluice_parrot.engine import ParrotEngine

__all__ = ["ParrotEngine"]
