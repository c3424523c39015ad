"""Families of models, one module each. To add one, write its module and list its FAMILY here (docs/parsers.md)."""

from services.postprocess.parsers.families import (
    arrays,
    cohere,
    dsml,
    gemma,
    granite_thinking,
    hunyuan,
    kimi_k3,
    minimax_m3,
    seed_oss,
    step3,
)
from services.postprocess.parsers.families.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: tuple[Family, ...] = (
    dsml.FAMILY,
    gemma.FAMILY,
    kimi_k3.FAMILY,
    minimax_m3.FAMILY,
    seed_oss.FAMILY,
    step3.FAMILY,
    hunyuan.FAMILY,
    cohere.FAMILY,
    arrays.PHI,
    arrays.JAMBA,
    arrays.NEMOTRON,
    granite_thinking.FAMILY,
)
"""The most specific marks first: `auto` takes the first family whose marks a template has."""
