"""Policy files: YAML with composed policies and the policy of each model; errors name file, line and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from services.common.base.errors import SluiceError, invalid, quoted
from services.router.scheduling.policies.built_in import BUILT_IN
from services.router.scheduling.policies.composition import Composition, StageConfig

MAX_BYTES = 1 << 20
"""Bytes of a policy file; a longer one is refused with INVALID_ARGUMENT."""
MAX_NODES = 20_000
"""Values of a policy file, repeated aliases included; a file with more is refused with INVALID_ARGUMENT."""
MAX_DEPTH = 20
"""Levels of a policy file; a deeper one is refused with INVALID_ARGUMENT."""
MAX_POLICIES = 16
"""Policies of a policy file; a file with more is refused with INVALID_ARGUMENT."""
MAX_STAGES = 32
"""Filters, or scorers, of one policy; a file with more is refused with INVALID_ARGUMENT."""
COSTS = ("kv", "load")
ON_FAILURE = ("reject", "ignore")


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """The content of a policy file.

    Attributes:
        default: policy of models without one of their own; empty: the router's setting.
        models: policy by served model.
    """

    compositions: Mapping[str, Composition] = field(default_factory=dict)
    default: str = ""
    models: Mapping[str, str] = field(default_factory=dict)

    def policy_of(self, model: str) -> str:
        """Returns the policy of a model; empty: the router's setting."""
        return self.models.get(model, self.default)


NO_POLICIES = PolicyFile()


def read_policies(path: Path) -> PolicyFile:
    """Returns the content of a policy file; raises SluiceError (INVALID_ARGUMENT) for the first mistake."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}.", param="policies") from error
    if len(content) > MAX_BYTES:
        raise invalid(f"{path} has more than {MAX_BYTES} bytes; a policy file is shorter.", param="policies")
    return _Reader(path).read(content)


class _Reader:
    """Reads one file, and finds the line of each field."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, int] = {}
        self._nodes = 0

    def read(self, content: bytes) -> PolicyFile:
        try:
            root = yaml.compose(content.decode("utf-8"), yaml.SafeLoader)
        except UnicodeDecodeError:
            raise invalid(f"{self._path} is not UTF-8.", param="policies") from None
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark is not None else ""
            problem = getattr(error, "problem", None) or "it cannot be parsed"
            raise invalid(f"{self._path}{line}: {problem}.", param="policies") from None
        document = None if root is None else self._value(root, "", 0)
        fields = self._fields("", document, ("policies", "default", "models"))
        policies = self._table("policies", fields.get("policies", {}))
        if len(policies) > MAX_POLICIES:
            raise self._wrong("policies", f"has {len(policies)} policies; the maximum is {MAX_POLICIES}")
        compositions = {name: self._composition(name, value) for name, value in policies.items()}
        known = sorted({*compositions, *BUILT_IN} - {"direct"})
        models = self._table("models", fields.get("models", {}))
        for name, policy in models.items():
            self._known(f"models.{name}", policy, known)
        if "default" in fields:
            self._known("default", fields["default"], known)
        return PolicyFile(compositions, fields.get("default", ""), models)

    def _composition(self, name: str, value: Any) -> Composition:
        place = f"policies.{name}"
        if name in BUILT_IN:
            raise self._wrong(place, "is the name of a built-in policy; choose another")
        if not name.isprintable() or len(name) > 64 or not name:
            raise self._wrong(place, "must be a name of 1 to 64 printable characters")
        fields = self._fields(place, value, ("filters", "scorers", "picker", "cost", "on_failure"))
        cost = fields.get("cost", "kv")
        if cost not in COSTS:
            raise self._wrong(f"{place}.cost", f"must be one of {', '.join(COSTS)}, not {quoted(cost)}")
        on_failure = fields.get("on_failure", "")
        if "on_failure" in fields and on_failure not in ON_FAILURE:
            allowed = ", ".join(ON_FAILURE)
            raise self._wrong(f"{place}.on_failure", f"must be one of {allowed}, not {quoted(on_failure)}")
        scorers = self._stages("scorer", f"{place}.scorers", fields.get("scorers", []))
        if scorers and not any(stage.weight for stage in scorers):
            raise self._wrong(f"{place}.scorers", "must have a weight above 0")
        picker = self._stage("picker", f"{place}.picker", fields.get("picker", "max_score"))
        filters = self._stages("filter", f"{place}.filters", fields.get("filters", []))
        return Composition(name, filters, scorers, picker, cost, on_failure)

    def _stages(self, kind: str, place: str, value: Any) -> tuple[StageConfig, ...]:
        if not isinstance(value, list):
            raise self._wrong(place, f"must be a list of {kind}s")
        if len(value) > MAX_STAGES:
            raise self._wrong(place, f"has {len(value)} stages; the maximum is {MAX_STAGES}")
        return tuple(self._stage(kind, f"{place}[{at}]", each) for at, each in enumerate(value))

    def _stage(self, kind: str, place: str, value: Any) -> StageConfig:
        """Returns a stage given as its name, or as a table with its name, parameters and, for a scorer, weight."""
        fields = {"name": value}
        if not isinstance(value, str):
            fields = self._fields(place, value, ("name", "parameters", *(["weight"] if kind == "scorer" else [])))
        name = fields.get("name")
        if not isinstance(name, str) or not name:
            raise self._wrong(place, f"must have the name of a {kind}")
        weight = fields.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1_000_000:
            raise self._wrong(f"{place}.weight", f"must be a number from 0 to 1000000, not {quoted(weight)}")
        parameters = self._table(f"{place}.parameters", fields.get("parameters", {}))
        inner = f"{place}.parameters"
        places = {each: self._where(f"{inner}.{each}") for each in parameters}
        if parameters:
            places[""] = self._where(inner)
        return StageConfig(kind, name, parameters, float(weight), self._where(place), places)

    def _known(self, place: str, policy: Any, known: Sequence[str]) -> None:
        if policy not in known:
            raise self._wrong(place, f"names the unknown policy {quoted(policy)}; use one of {', '.join(known)}")

    def _fields(self, place: str, value: Any, allowed: Sequence[str]) -> dict[str, Any]:
        fields = self._table(place, value)
        for name in fields:
            if name not in allowed:
                inner = f"{place}.{name}".lstrip(".")
                raise self._wrong(inner, f"is not a field; use one of {', '.join(allowed)}")
        return fields

    def _table(self, place: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(place, "must be a table of names and values")
        return value

    def _value(self, node: yaml.Node, place: str, depth: int) -> Any:
        """Returns the value of a node and records the lines of all fields in it."""
        self._lines.setdefault(place, node.start_mark.line + 1)
        self._nodes += 1  # counts repeated aliases too, which would otherwise expand without bound
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise self._wrong(place, f"exceeds {MAX_NODES} values or {MAX_DEPTH} levels")
        if isinstance(node, yaml.SequenceNode):
            return [self._value(each, f"{place}[{at}]", depth + 1) for at, each in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self._scalar(node, place)
        table: dict[str, Any] = {}
        for key, value in node.value:
            inner = f"{place}.{key.value}".lstrip(".") if isinstance(key, yaml.ScalarNode) else place
            self._lines[inner] = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.value in table:
                raise self._wrong(
                    inner, "appears twice" if isinstance(key, yaml.ScalarNode) else "has a key that is not a text"
                )
            table[key.value] = self._value(value, inner, depth + 1)
        return table

    def _scalar(self, node: yaml.Node, place: str) -> Any:
        loader = yaml.SafeLoader("")
        try:
            value = loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self._wrong(place, f"has a value that cannot be read ({getattr(error, 'problem', error)})") from None
        finally:
            loader.dispose()
        if value is not None and not isinstance(value, bool | int | float | str):
            raise self._wrong(place, f"has a value of type {type(value).__name__}; use a text, a number, true or false")
        return value

    def _where(self, place: str) -> str:
        found = place
        while found and found not in self._lines:
            found = found.rpartition(".")[0]
        return f"{self._path}, line {self._lines.get(found, 1)}: {place or 'the file'}"

    def _wrong(self, place: str, problem: str) -> SluiceError:
        return invalid(f"{self._where(place)} {problem}.", param="policies")
