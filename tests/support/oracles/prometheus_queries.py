"""The queries of Grafana dashboards, as Prometheus takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.servers.compose_suite import get_json

BUILT_IN = {"__rate_interval": "1m", "__interval": "30s", "__range": "5m", "__interval_ms": "30000", "__range_s": "300"}


def dashboard_queries(folder: Path) -> list[tuple[str, str]]:
    """ "dashboard: panel" and query, with every variable at "all"."""
    found = []
    for file in sorted(folder.glob("*.json")):
        dashboard = json.loads(file.read_text())
        values = BUILT_IN | {one["name"]: ".*" for one in dashboard.get("templating", {}).get("list", ())}
        for panel in _panels(dashboard):
            name = f"{dashboard['title']}: {panel.get('title')}"
            found += [(name, _filled(target["expr"], values)) for target in panel.get("targets", ())]
    return found


def answers(prometheus: str, query: str) -> list[Any]:
    """The series that Prometheus answers with now."""
    answer = get_json(f"{prometheus}/api/v1/query?query={quote(query)}")
    assert answer["status"] == "success", answer
    result = answer["data"]["result"]
    return list(result) if answer["data"]["resultType"] == "vector" else [result]


def _panels(holder: Any) -> Iterator[Any]:
    for panel in holder.get("panels", ()):
        yield panel
        yield from _panels(panel)


def _filled(expression: str, values: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return values.get(match[1] or match[2], match[0])

    return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", value, expression)
