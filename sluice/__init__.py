"""Sluice serves large language models as a suite of small gRPC services."""

__version__ = "0.1.0"
