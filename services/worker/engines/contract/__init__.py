"""Defines the contract between a worker and its engine; engine authors import it from `sluice`."""
