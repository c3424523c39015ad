"""The dashboards: made from their specification, and every query is about a metric that exists."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.oracles.promql import OBSERVABILITY, faults, run_promtool

FOLDER = OBSERVABILITY / "dashboards"
VARIABLE = re.compile(r"label_values\((\w+), (\w+)\)")


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def variables(dashboard: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"}


def test_dashboard_files_match_their_specification() -> None:
    found = importlib.util.spec_from_file_location("observability_dashboards", OBSERVABILITY / "dashboards.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    wanted: dict[Path, str] = module.files()
    there = {path: path.read_text() for path in FOLDER.glob("*.json")}
    assert there == wanted, "run `python deploy/observability/dashboards.py`"


def test_all_of_them_are_there() -> None:
    assert set(dashboards()) == {"overview", "router", "workers", "stages"}
    assert len({one["uid"] for one in dashboards().values()}) == 4


@pytest.mark.parametrize("name", list(dashboards()))
def test_every_query_is_about_metrics_and_labels_that_exist(name: str) -> None:
    dashboard = dashboards()[name]
    assert len(queries(dashboard)) > 10
    wrong = {query: found for query in queries(dashboard) if (found := faults(query))}
    assert wrong == {}
    for definition in variables(dashboard).values():
        asked = VARIABLE.fullmatch(definition)
        assert asked is not None
        assert faults(f'{asked[1]}{{{asked[2]}="$x"}}') == []


@pytest.mark.parametrize("name", list(dashboards()))
def test_panels_do_not_overlap_and_variables_are_defined(name: str) -> None:
    dashboard = dashboards()[name]
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    used = {name for query in queries(dashboard) for name in re.findall(r"\$(\w+)", query)} - {"__rate_interval"}
    assert used == set(variables(dashboard))


def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{name}:{index}", "expr": query.replace("$__rate_interval", "5m")}
        for name, dashboard in dashboards().items()
        for index, query in enumerate(queries(dashboard))
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    checked = run_promtool("check", "rules", str(path), folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
