"""promtool, and what a PromQL query is about."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from scripts.pages import metrics
from services.common.observability.declarations import Declared
from tests.support.repository import ROOT

OBSERVABILITY = ROOT / "deploy" / "observability"
RULES = OBSERVABILITY / "rules" / "sluice.yaml"

_OF_A_HISTOGRAM = ("_bucket", "_count", "_sum")
_METRIC = re.compile(r"\b(?:sluice|process|python)_[a-z0-9_]+")
_SELECTOR = re.compile(r"(\b[a-z0-9_]+)\{([^}]*)\}")
_LABEL = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")
SCRAPED = {"instance", "job", "le"}
FROM_PROMETHEUS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
"""What prometheus_client itself exposes."""


@cache
def promtool() -> str:
    """Path of the program; the test fails with what to do when it cannot be had."""
    fetched = ROOT / ".venv" / "opt" / "prometheus" / "usr" / "bin" / "promtool"
    found = shutil.which("promtool")
    if found is None and not fetched.exists():
        fetching = subprocess.run([str(ROOT / "scripts" / "promtool.sh")], capture_output=True, text=True, timeout=300)
        if fetching.returncode:
            pytest.fail(f"The alert rules cannot be checked without promtool: {fetching.stderr.strip()}", pytrace=False)
    return found or str(fetched)


def run_promtool(*arguments: str, folder: Path = RULES.parent) -> subprocess.CompletedProcess[str]:
    """Runs it in a folder; the caller looks at the outcome."""
    return subprocess.run([promtool(), *arguments], capture_output=True, text=True, timeout=120, cwd=folder)


@cache
def series() -> dict[str, Declared]:
    """Every series name of ours there can be."""
    found = {}
    for one in metrics.declared():
        for name in (one.exposed + suffix for suffix in _OF_A_HISTOGRAM) if one.kind == "histogram" else (one.exposed,):
            found[name] = one
    return found


def faults(query: str) -> list[str]:
    """What a query says of metrics and labels that there are not."""
    known, wrong, labels = series(), [], set(SCRAPED)
    for name in set(_METRIC.findall(query)):
        one = known.get(name)
        if one is not None:
            labels |= {label.name for label in one.labels}
        elif name not in FROM_PROMETHEUS:
            wrong.append(f"no metric {name}")
    for name, selector in _SELECTOR.findall(query):
        wrong += _selected(known.get(name), selector)
    for grouping in _GROUPING.findall(query):
        wrong += [f"no label {label}" for label in re.split(r"\s*,\s*", grouping.strip()) if label not in labels]
    return wrong


def _selected(one: Declared | None, selector: str) -> list[str]:
    wrong = []
    declared = {label.name: label for label in one.labels} if one is not None else {}
    for name, _, value in _LABEL.findall(selector):
        label = declared.get(name)
        if label is None:
            wrong += [] if name in SCRAPED else [f"no label {name}"]
        elif label.values and "$" not in value:
            wrong += [f"{name} is never {part}" for part in value.split("|") if part not in label.values]
    return wrong
