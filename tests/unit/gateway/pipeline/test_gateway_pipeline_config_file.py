"""Preset, file and flags; what cannot be is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.pipeline.config import PRESETS, PipelineConfig, parse_stages, resolve
from services.gateway.settings import GatewaySettings


def test_presets() -> None:
    assert resolve({}) == resolve({"preset": "full_discovery"}) == PipelineConfig()
    direct, query = (resolve({"preset": name}) for name in ("direct_execution", "query_only"))
    assert (direct.routing, direct.migration) == ("direct", True)
    assert (query.routing, query.migration) == ("query-only", False)
    assert len(PRESETS) == 3


@pytest.mark.parametrize(
    ("flags", "routing", "migration"),
    [
        ({"direct_route": True}, "direct", True),
        ({"direct_route": True, "migration_enabled": False}, "direct", False),
        ({"direct_route": False}, "discover", True),
        ({"migration_enabled": True, "preset": "direct_execution"}, "direct", True),
        ({"direct_route": True, "routing": "direct", "migration_enabled": True, "migration": True}, "direct", True),
    ],
)
def test_other_gateways_names_of_knobs_mean_ours(flags: dict[str, Any], routing: str, migration: bool) -> None:
    found = resolve(flags)
    assert (found.routing, found.migration) == (routing, migration)


def test_other_gateways_names_are_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("direct_route = true\nmigration_enabled = false\n")
    found = GatewaySettings.load(["--pipeline-config", str(tmp_path / "p.toml")]).pipeline
    assert (found.routing, found.migration) == ("direct", False)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"direct_route": True, "routing": "discover"}, "direct-route contradicts routing discover"),
        ({"migration_enabled": True, "migration": False}, "migration-enabled contradicts migration"),
    ],
)
def test_contradicting_names_of_one_knob_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        resolve(flags)


@pytest.mark.parametrize("kind", ["toml", "yaml", "json"])
def test_a_file_changes_its_preset_and_flags_change_the_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"pipeline.{kind}"
    texts = {
        "toml": 'preset = "direct_execution"\nmigration = true\n"disagg-min-tokens" = 9\n[stages]\ntokenize = "a:B"\n',
        "yaml": "preset: direct_execution\nmigration: true\ndisagg-min-tokens: 9\nstages: {tokenize: 'a:B'}\n",
        "json": json.dumps(
            {"preset": "direct_execution", "migration": True, "disagg-min-tokens": 9, "stages": {"tokenize": "a:B"}}
        ),
    }
    file.write_text(texts[kind])
    found = resolve({}, file)
    assert (found.routing, found.migration, found.disagg_min_tokens) == ("direct", True, 9)
    assert dict(found.stages) == {"tokenize": "a:B"}
    changed = resolve({"routing": "discover", "migration": False, "stages": {"route": "c:D"}}, file)
    assert (changed.routing, changed.migration) == ("discover", False)
    assert dict(changed.stages) == {"tokenize": "a:B", "route": "c:D"}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("p.toml", 'routing = "anywhere"', "routing must be one of discover, direct, query-only"),
        ("p.toml", "rooting = 1", "rooting is unknown"),
        ("p.toml", "migration = 1", "migration must be true or false"),
        ("p.toml", "direct_route = 1", "direct_route must be true or false"),
        ("p.toml", "= 1", "cannot be read"),
        ("p.json", "[]", "must contain fields"),
        ("p.json", '{"disagg_min_tokens": true}', "whole number"),
        ("p.json", '{"handler": 1}', "handler must be"),
        ("p.json", '{"stages": []}', "stages must map"),
        ("p.yaml", "a: [", "cannot be read"),
        ("p.txt", "", "must end in"),
        ("p.json", '{"stages": {"route": 1}}', "route=package.module:Class"),
        ("p.json", '{"preset": "none"}', "preset must be one of"),
        ("p.json", '{"models": []}', "models must map each model to fields such as routing"),
        ("p.json", '{"models": {"a": 1}}', "models: a must contain fields"),
        ("p.json", '{"models": {"a": {"rooting": 1}}}', "models: a: rooting is unknown"),
        ("p.json", '{"models": {"a": {"models": {}}}}', "models: a: models is unknown"),
        ("p.json", '{"models": {"a": {"stages": {"route": 1}}}}', "route=package.module:Class"),
        (
            "p.json",
            '{"models": {"a": {"preset": "query_only", "preprocessing": "engine"}}}',
            "models: a: routing query-only returns token ids",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        resolve({}, file)


@pytest.mark.parametrize(
    "config",
    [
        PipelineConfig(disaggregation="require", preprocessing="engine"),
        PipelineConfig(disaggregation="require", postprocessing="engine"),
        PipelineConfig(stages={"tokenize": "a:B"}, preprocessing="engine"),
        PipelineConfig(stages={"postprocess": "a:B"}, postprocessing="engine"),
        PipelineConfig(stages={"route": "a:B"}, routing="direct"),
        PipelineConfig(stages={"route": "a:B", "place": "a:B"}),
        PipelineConfig(routing="query-only", preprocessing="engine"),
    ],
)
def test_conflicting_options_raise_an_error_with_the_fix(config: PipelineConfig) -> None:
    with pytest.raises(ValueError, match=r"set |leave "):
        config.check()


def test_stages_as_flags() -> None:
    assert parse_stages(["route=a.b:C"]) == {"route": "a.b:C"}
    for texts in (["route"], ["x=a:B"], ["route=a"], ["route=a:B", "route=a:C"]):
        with pytest.raises(ValueError, match="stage"):
            parse_stages(texts)


def test_the_services_that_are_needed() -> None:
    assert PipelineConfig().services == {"preprocess", "router", "postprocess"}
    assert PipelineConfig(preprocessing="engine", postprocessing="engine").services == {"router"}
    assert PipelineConfig(routing="query-only").services == {"preprocess", "router"}


def test_the_gateway_refuses_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        GatewaySettings.load(["--routing", "query-only", "--preprocessing", "engine"])
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert "set preprocessing to frontend" in printed
    assert "Traceback" not in printed
    assert GatewaySettings.load(["--preset", "direct_execution", "--migration"]).pipeline.migration is True
    assert GatewaySettings.load(["--no-migration"]).migration_policy.enabled is False


def test_model_section_overrides_only_the_fields_it_sets(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(
        """
        disaggregation = "off"
        [stages]
        route = "a:Route"
        [models.big]
        disaggregation = "require"
        stages = { tokenize = "b:Tokenize" }
        [models.direct]
        preset = "direct_execution"
        """
    )
    found = resolve({"disagg_min_tokens": 7}, file)
    assert found.of("any") is found
    big, direct = found.of("big"), found.of("direct")
    assert (big.disaggregation, big.disagg_min_tokens) == ("require", 7)
    assert dict(big.stages) == {"route": "a:Route", "tokenize": "b:Tokenize"}
    assert (direct.routing, direct.disaggregation, dict(direct.stages)) == ("direct", "auto", {})


def test_services_are_those_that_any_model_needs() -> None:
    engine = PipelineConfig(preprocessing="engine", postprocessing="engine")
    assert engine.services == {"router"}
    mixed = PipelineConfig(preprocessing="engine", postprocessing="engine", models={"m": PipelineConfig()})
    assert mixed.services == {"router", "preprocess", "postprocess"}
