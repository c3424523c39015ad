"""Generates the Grafana dashboards: `python deploy/observability/dashboards.py` writes dashboards/ of dashboards.yaml.

Every panel is a time series with a title, a unit, and queries with their legends; three per row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SPECIFICATION = HERE / "dashboards.yaml"
FOLDER = HERE / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def render(name: str, dashboard: dict[str, Any]) -> dict[str, Any]:
    """Returns Grafana's JSON of one dashboard."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    variables = [_variable(*item) for item in dashboard.get("variables", {}).items()]
    links = {"type": "dashboards", "tags": ["sluice"], "asDropdown": False, "title": "", "includeVars": False}
    return {
        "uid": f"sluice-{name}",
        "title": dashboard["title"],
        "tags": ["sluice"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "links": [links],
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "panels": _panels(dashboard["rows"]),
    }


def _panels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        heading = {"type": "row", "title": row["title"], "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **heading, "gridPos": _at(0, top, 24, 1)})
        top += 1
        for index, panel in enumerate(row["panels"]):
            position = _at(index % COLUMNS * WIDTH, top + index // COLUMNS * HEIGHT, WIDTH, HEIGHT)
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": position})
        top += -(-len(row["panels"]) // COLUMNS) * HEIGHT
    return panels


def _at(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(panel: dict[str, Any]) -> dict[str, Any]:
    defaults = {"unit": panel["unit"], "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    return {
        "type": "timeseries",
        "title": panel["title"],
        "description": panel.get("about", ""),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel["queries"].items())
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def files() -> dict[Path, str]:
    """Returns the content of every generated file, by path."""
    dashboards: dict[str, dict[str, Any]] = yaml.safe_load(SPECIFICATION.read_text(encoding="utf-8"))
    return {FOLDER / f"{name}.json": json.dumps(render(name, it), indent=1) + "\n" for name, it in dashboards.items()}


def main() -> None:
    """Writes the files."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
