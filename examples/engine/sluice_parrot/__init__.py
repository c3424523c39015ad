"""An engine for Sluice that says every prompt back."""

from sluice_parrot.engine import ParrotEngine

__all__ = ["ParrotEngine"]
