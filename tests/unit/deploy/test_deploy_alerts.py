"""The alert rules: valid, about metrics that exist, and each tried both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.oracles.promql import RULES, faults, run_promtool

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
