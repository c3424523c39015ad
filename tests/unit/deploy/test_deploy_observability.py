"""Dashboards and alert rules."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.oracles.promql import OBSERVABILITY, RULES, faults, run_promtool

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


TESTS = RULES.with_name("sluice.test.yaml")


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_rules() -> None:
    checked = run_promtool("check", "rules", "--lint-fatal", RULES.name)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    tried = run_promtool("test", "rules", TESTS.name)
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_the_tests_notice_a_rule_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / TESTS.name).write_text(TESTS.read_text())
    (tmp_path / RULES.name).write_text(RULES.read_text().replace("for: 2m", "for: 40m"))
    assert run_promtool("test", "rules", TESTS.name, folder=tmp_path).returncode != 0


def test_every_alert_is_tried_both_ways() -> None:
    names = [case["name"] for case in yaml.safe_load(TESTS.read_text())["tests"]]
    wanted = [f"{alert['alert']} {word}" for alert in alerts() for word in ("fires", "is quiet")]
    assert sorted(names) == sorted(wanted)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_alert_uses_existing_metrics_and_links_to_its_runbook(alert: dict[str, Any]) -> None:
    assert faults(alert["expr"]) == []
    assert alert["labels"]["severity"] in ("page", "ticket", "info")
    assert set(alert["annotations"]) == {"summary", "action"}
    for sentence in alert["annotations"].values():
        assert sentence.endswith(".")


def test_what_does_not_exist_is_noticed() -> None:
    assert faults("rate(sluice_gateway_generation_total[5m])") == ["no metric sluice_gateway_generation_total"]
    assert faults('sluice_router_shed_total{model="m"}') == ["no label model"]
    assert faults('sluice_worker_canaries_total{outcome="fine"}') == ["outcome is never fine"]
    assert faults("sum by (verb) (sluice_router_shed_total)") == ["no label verb"]
    assert faults("sum(sluice_router_query_seconds)") == ["no metric sluice_router_query_seconds"]
