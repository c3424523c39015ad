"""PipelineConfig: what of a request's way runs where, from a preset, a file and flags; checked at start."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

StageLocation = Literal["frontend", "engine"]
Routing = Literal["discover", "direct", "query-only"]
Disaggregation = Literal["auto", "require", "off"]
PresetName = Literal["full_discovery", "direct_execution", "query_only"]
StageName = Literal["tokenize", "route", "place", "postprocess"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "full_discovery": {},
    "direct_execution": {"routing": "direct"},
    "query_only": {"routing": "query-only", "migration": False},
}
DEFAULT_PRESET = "full_discovery"
ALIASES = ("direct_route", "migration_enabled")
"""Names of knobs that users of other gateways bring along: `routing: direct`, and `migration`."""
_NO_STAGES: Mapping[str, str] = MappingProxyType({})
_NO_MODELS: Mapping[str, PipelineConfig] = MappingProxyType({})


@dataclass(frozen=True)
class PipelineConfig:
    """The knobs of the pipeline.

    Attributes:
        preprocessing: who makes token ids of prompts: preprocess services, or the worker's engine.
        postprocessing: who makes text of tokens: postprocess services, or the worker's engine.
        routing: discover: the router chooses. direct: each request says which worker runs it. query-only: requests are
            answered with token ids and the workers that would be chosen, and nothing runs.
        migration: generations whose worker is lost go on elsewhere.
        disaggregation: as `disaggregation.DisaggRules`.
        disagg_min_tokens: as there.
        stages: `package.module:Class` by stage, in place of the project's own.
        handler: `package.module:Class` in place of the whole pipeline; empty: the project's own.
        models: by served name, configurations that differ from this one.
    """

    preprocessing: StageLocation = "frontend"
    postprocessing: StageLocation = "frontend"
    routing: Routing = "discover"
    migration: bool = True
    disaggregation: Disaggregation = "auto"
    disagg_min_tokens: int = 0
    stages: Mapping[str, str] = field(default_factory=lambda: _NO_STAGES)
    handler: str = ""
    models: Mapping[str, PipelineConfig] = field(default_factory=lambda: _NO_MODELS)

    def check(self) -> PipelineConfig:
        """Itself; ValueError with a sentence that says what to change when the knobs exclude each other."""
        for refusal, applies in _refusals(self).items():
            if applies:
                raise ValueError(refusal)
        for name, config in self.models.items():
            try:
                config.check()
            except ValueError as error:
                raise ValueError(f"models: {name}: {error}") from error
        return self

    def of(self, model: str) -> PipelineConfig:
        """The configuration of a model, by its served name."""
        return self.models.get(model, self)

    @property
    def all(self) -> list[PipelineConfig]:
        """This one and those of single models."""
        return [self, *self.models.values()]

    @property
    def services(self) -> frozenset[str]:
        """The services without which one of the configurations cannot be served."""
        needed = {"router"}
        for config in self.all:
            if config.preprocessing == "frontend" and "tokenize" not in config.stages:
                needed.add("preprocess")
            if config.replicas_make_text and config.routing != "query-only":
                needed.add("postprocess")
        return frozenset(needed)

    @property
    def replicas_make_text(self) -> bool:
        """Whether postprocess services make the text under this configuration; those of models may differ."""
        return self.postprocessing == "frontend" and "postprocess" not in self.stages


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> PipelineConfig:
    """The configuration of a preset, changed by a file, changed by flags.

    Args:
        flags: by field of PipelineConfig, and `preset`; None is unset.
        file: TOML, YAML or JSON with the same names; dashes count as underscores.

    Raises:
        ValueError: a sentence that says what to change.
    """
    filed = _unaliased(read(file)) if file is not None else {}
    given = _unaliased({name: value for name, value in flags.items() if value is not None})
    preset = given.pop("preset", None) or filed.pop("preset", None) or DEFAULT_PRESET
    filed.pop("preset", None)
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}.")
    models = filed.pop("models", {})
    stages = {**filed.pop("stages", {}), **given.pop("stages", {})}
    config = PipelineConfig(**{**PRESETS[preset], **filed, **given}, stages=MappingProxyType(stages))
    by_model = {name: _of_model(config, values) for name, values in models.items()}
    return replace(config, models=MappingProxyType(by_model)).check()


def _of_model(config: PipelineConfig, values: Mapping[str, Any]) -> PipelineConfig:
    """What a file has for one model: on top of the preset it names, or else of what all models have."""
    changes = _unaliased(values)
    if "preset" in changes:
        config = PipelineConfig(**PRESETS[changes.pop("preset")])
    if "stages" in changes:
        changes["stages"] = MappingProxyType({**config.stages, **changes["stages"]})
    return replace(config, **changes)


def read(file: Path) -> dict[str, Any]:
    """Returns the fields of a file, checked one by one; ValueError with a sentence that names the file."""
    try:
        found = _parsed(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    values = _checked(str(file), found, _ALLOWED)
    if (models := values.get("models")) is not None:
        if not isinstance(models, dict):
            raise ValueError(f"{file}: models must hold fields such as routing for each model.")
        values["models"] = {
            str(name): _checked(f"{file}: models: {name}", of_model, _ALLOWED_OF_MODEL)
            for name, of_model in models.items()
        }
    return values


def _checked(place: str, found: Any, allowed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{place} must hold fields such as routing, not {type(found).__name__}.")
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    for name, value in values.items():
        if name not in allowed:
            raise ValueError(f"{place}: {name} is unknown; there are {', '.join(allowed)}.")
        _check_value(place, name, value)
    return values


def _unaliased(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same knobs under their own names; ValueError when an alias contradicts one of them."""
    named = dict(values)
    direct, enabled = (named.pop(alias, None) for alias in ALIASES)
    if direct and named.setdefault("routing", "direct") != "direct":
        raise ValueError(f"direct-route contradicts routing {named['routing']}: leave one of them out.")
    if enabled is not None and named.setdefault("migration", enabled) is not enabled:
        raise ValueError("migration-enabled contradicts migration: leave one of them out.")
    return named


def parse_stages(texts: list[str]) -> dict[str, str]:
    """`NAME=package.module:Class` texts by name; ValueError with a sentence for anything else."""
    stages: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        _check_stage(name, path)
        if name in stages:
            raise ValueError(f"stage {name} is given twice.")
        stages[name] = path
    return stages


def _parsed(file: Path) -> Any:
    text = file.read_text("utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    if file.suffix == ".toml":
        return tomllib.loads(text)
    if file.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError as error:
            raise ValueError("YAML needs the package pyyaml; install it, or write TOML or JSON") from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
    raise ValueError("its name must end in .toml, .yaml, .yml or .json")


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "preset": get_args(PresetName),
    "preprocessing": get_args(StageLocation),
    "postprocessing": get_args(StageLocation),
    "routing": get_args(Routing),
    "disaggregation": get_args(Disaggregation),
}
_ALLOWED = ("preset", *(one.name for one in fields(PipelineConfig)), *ALIASES)
_ALLOWED_OF_MODEL = tuple(name for name in _ALLOWED if name != "models")


def _check_value(file: str, name: str, value: Any) -> None:
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ValueError(f"{file}: {name} must be one of {', '.join(_CHOICES[name])}, not {value!r}.")
    if name in ("migration", *ALIASES) and not isinstance(value, bool):
        raise ValueError(f"{file}: {name} must be true or false, not {value!r}.")
    if name == "disagg_min_tokens" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{file}: disagg_min_tokens must be a whole number of at least 0, not {value!r}.")
    if name == "handler" and not isinstance(value, str):
        raise ValueError(f"{file}: handler must be package.module:Class, not {value!r}.")
    if name == "stages":
        if not isinstance(value, dict):
            raise ValueError(f"{file}: stages must name a package.module:Class for each stage.")
        for stage, path in value.items():
            _check_stage(str(stage), path if isinstance(path, str) else "")


def _check_stage(name: str, path: str) -> None:
    if name not in get_args(StageName):
        raise ValueError(f"stage {name!r} is unknown; there are {', '.join(get_args(StageName))}.")
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"stage {name} must be {name}=package.module:Class, not {path!r}.")


def _refusals(config: PipelineConfig) -> dict[str, bool]:
    """Sentences, each with whether it is what is wrong."""
    engine_makes_ids = config.preprocessing == "engine"
    engine_makes_text = config.postprocessing == "engine"
    return {
        "routing query-only answers token ids, and with preprocessing engine there are none before a worker runs: set "
        "preprocessing to frontend, or routing to discover or direct.": config.routing == "query-only"
        and engine_makes_ids,
        "disaggregation require needs the token ids and the text in the gateway: set preprocessing and postprocessing "
        "to frontend, or disaggregation to auto.": config.disaggregation == "require"
        and (engine_makes_ids or engine_makes_text),
        "stage tokenize replaces the preprocess services, and with preprocessing engine nobody asks them: set "
        "preprocessing to frontend, or leave the stage out.": "tokenize" in config.stages and engine_makes_ids,
        "stage postprocess replaces the postprocess services, and with postprocessing engine nobody asks them: set "
        "postprocessing to frontend, or leave the stage out.": "postprocess" in config.stages and engine_makes_text,
        "stage route replaces the router's choice, and with routing direct nobody asks it: set routing to discover, or "
        "leave the stage out.": "route" in config.stages and config.routing == "direct",
        "stage place chooses and connects workers itself: leave stage route or stage place out.": {"route", "place"}
        <= config.stages.keys(),
    }
