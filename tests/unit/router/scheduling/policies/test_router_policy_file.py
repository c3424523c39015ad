"""Policy files: what they mean, and that every mistake names file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.router.scheduling.policies.config import MAX_BYTES, read_policies
from services.router.scheduling.policies.registry import ComposedPolicies
from tests.support.repository import ROOT

GOOD = """\
policies:
  team:
    filters:
      - name: prefix_cache
        parameters: {least: 0.5}
    scorers:
      - prefix_cache
      - {name: load, weight: 2}
    picker: {name: max_score, parameters: {within: 0.1}}
    cost: load
default: team
models:
  small: least_loaded
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "policies.yaml"
    path.write_text(text)
    return path


def test_policy_file_read_returns_compositions_and_the_policy_of_each_model(tmp_path: Path) -> None:
    file = read_policies(written(tmp_path, GOOD))
    team = file.compositions["team"]
    assert [(stage.kind, stage.name, stage.weight, stage.parameters) for stage in team.stages] == [
        ("filter", "prefix_cache", 1.0, {"least": 0.5}),
        ("scorer", "prefix_cache", 1.0, {}),
        ("scorer", "load", 2.0, {}),
        ("picker", "max_score", 1.0, {"within": 0.1}),
    ]
    assert (team.cost, team.built_in) == ("load", True)
    assert (file.policy_of("small"), file.policy_of("other")) == ("least_loaded", "team")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("cost: load", "cost: best", 10, "policies.team.cost must be one of kv, load, not 'best'"),
        ("weight: 2", "weight: -2", 8, "policies.team.scorers[1].weight must be a number from 0 to"),
        ("weight: 2", "weight: .nan", 8, "policies.team.scorers[1].weight must be"),
        (
            "weight: 2",
            "wight: 2",
            8,
            "policies.team.scorers[1].wight is not a field; use one of name, parameters, weight",
        ),
        ("default: team", "default: tame", 11, "default names the unknown policy 'tame'; use one of kv, least_loaded,"),
        ("small: least_loaded", "small: [x]", 13, "models.small names the unknown policy"),
        ("default: team", "defaults: team", 11, "defaults is not a field; use one of policies, default, models"),
        ("  team:", "  kv:", 2, "policies.kv is the name of a built-in policy"),
        ("default: team", "policies: {}", 11, "policies appears twice"),
        ("    picker:", "    filters: []\n    picker:", 9, "policies.team.filters appears twice"),
        ("{name: load, weight: 2}", "{weight: 2}", 8, "policies.team.scorers[1] must have the name of a scorer"),
        ("{name: load, weight: 2}", "7", 8, "policies.team.scorers[1] must be a table"),
        ("least: 0.5", "least: 2020-01-01", 5, "parameters.least has a value of type date"),
        ("cost: load", "cost: [", 12, "expected"),
    ],
)
def test_policy_file_with_a_mistake_is_rejected_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    path = written(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(SluiceError) as caught:
        read_policies(path)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert f"{path}, line {line}: " in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "- prefix_cache\n",
            "- prefix_cash\n",
            7,
            "unknown scorer 'prefix_cash'; use one of kv_cost, load, prefix_cache",
        ),
        ("name: max_score", "name: load", 9, "unknown picker 'load'; use one of max_score, power_of_two, random,"),
        ("within: 0.1", "within: 3", 9, "within must be a number from 0 to 1, not 3"),
        ("within: 0.1", "without: 3", 9, "the parameters of max_score are: within"),
        ("least: 0.5", "strict: true", 5, "missing a required"),
        ("least: 0.5", "least: yes", 5, "least must be a number from 0 to 1, not True"),
        (
            "name: max_score, parameters: {within: 0.1}",
            "name: random, parameters: {random: 3}",
            9,
            "the parameters of random are: none",
        ),
    ],
)
async def test_policy_with_an_unusable_stage_is_rejected_with_its_line_at_the_start(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    path = written(tmp_path, GOOD.replace(old, new, 1))
    policies = ComposedPolicies(read_policies(path))
    with pytest.raises(SluiceError) as caught:
        await policies.start()
    await policies.close()
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert f"{path}, line {line}: policies.team." in caught.value.message
    assert message in caught.value.message


def test_policy_file_that_would_expand_without_bound_is_rejected(tmp_path: Path) -> None:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(8)]
    with pytest.raises(SluiceError, match="exceeds"):
        read_policies(written(tmp_path, "\n".join(lines)))
    with pytest.raises(SluiceError, match=r"exceeds|cannot be parsed"):
        read_policies(written(tmp_path, "a: " + "[" * 5_000 + "]" * 5_000))
    with pytest.raises(SluiceError, match="more than"):
        read_policies(written(tmp_path, "#" * (MAX_BYTES + 1)))


@pytest.mark.parametrize("text", ["", "[]", "null", "7", "policies: 3", "policies: {a: null}", "\udcff"])
def test_policy_file_without_tables_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policies.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SluiceError, match=r"policies\.yaml"):
        read_policies(path)


def test_policy_file_that_is_missing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="cannot be read"):
        read_policies(tmp_path / "none.yaml")


def test_policy_file_of_the_example_is_valid() -> None:
    file = read_policies(ROOT / "examples/policies/policies.yaml")
    assert file.default == "pools"
    assert not file.compositions["sticky"].built_in
