"""Configuration of the pipeline, from a preset, a file and flags; validated at startup."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
MEANING = "meaning"
"""Key of the meaning of an option in the metadata of its field."""
ALIASES = ("direct_route", "migration_enabled")
"""Alternative names, known from other gateways, of `routing: direct` and `migration`."""


@dataclass(frozen=True)
class PipelineConfig:
    """Options of the pipeline. For each one with a meaning the gateway and `sluice up` have a flag.

    Attributes:
        stages: custom stages, `package.module:Class` by stage name.
        models: configurations of single models that differ from this one, by served name.
    """

    preprocessing: StageLocation = field(
        default="frontend",
        metadata={
            MEANING: "where prompts are tokenized: preprocess services (frontend, default) or the worker's engine"
        },
    )
    postprocessing: StageLocation = field(
        default="frontend",
        metadata={MEANING: "where tokens become text: postprocess services (frontend, default) or the worker's engine"},
    )
    routing: Routing = field(
        default="discover",
        metadata={
            MEANING: "the router chooses the worker (discover, default); the request names the worker (direct); the "
            "response only reports the workers that would be chosen (query-only)"
        },
    )
    migration: bool = field(
        default=True, metadata={MEANING: "continue generations whose worker is lost on another worker (default: on)"}
    )
    disaggregation: Disaggregation = field(
        default="auto",
        metadata={
            MEANING: "use pairs of prefill and decode workers: when both are available (auto, default), always "
            "(require), never (off)"
        },
    )
    disagg_min_tokens: int = field(
        default=0,
        metadata={
            MEANING: "prompts with fewer uncached tokens are not disaggregated where one worker can run them alone; 0 "
            "(default): as the router's setting"
        },
    )
    stages: Mapping[str, str] = field(default_factory=dict)
    handler: str = field(default="", metadata={MEANING: "package.module:Class, a custom pipeline"})
    models: Mapping[str, PipelineConfig] = field(default_factory=dict)

    def check(self) -> PipelineConfig:
        """Returns this configuration if its options are consistent.

        Raises:
            ValueError: two options conflict; the message states what to change.
        """
        for message, applies in _conflicts(self).items():
            if applies:
                raise ValueError(message)
        for name, config in self.models.items():
            try:
                config.check()
            except ValueError as error:
                raise ValueError(f"models: {name}: {error}") from error
        return self

    def of(self, model: str) -> PipelineConfig:
        """Returns the configuration of a model, by served name."""
        return self.models.get(model, self)

    @property
    def all(self) -> list[PipelineConfig]:
        """This configuration and those of single models."""
        return [self, *self.models.values()]

    @property
    def any_replicas_make_text(self) -> bool:
        """Whether postprocess replicas make the text of at least one of the configurations."""
        return any(config.replicas_make_text for config in self.all)

    @property
    def services(self) -> frozenset[str]:
        """Services required by at least one of the configurations."""
        needed = {"router"}
        for config in self.all:
            if config.preprocessing == "frontend" and "tokenize" not in config.stages:
                needed.add("preprocess")
            if config.replicas_make_text and config.routing != "query-only":
                needed.add("postprocess")
        return frozenset(needed)

    @property
    def replicas_make_text(self) -> bool:
        """Whether postprocess replicas make the text, for models without a configuration of their own."""
        return self.postprocessing == "frontend" and "postprocess" not in self.stages


def options() -> dict[str, tuple[Any, str]]:
    """Returns the type and the meaning of each option that is a flag, by name."""
    types = get_type_hints(PipelineConfig)
    return {one.name: (types[one.name], one.metadata[MEANING]) for one in fields(PipelineConfig) if one.metadata}


def resolve(flags: Mapping[str, Any], file: Path | None = None) -> PipelineConfig:
    """Returns the configuration of a preset with the changes of a file and, on top, of flags.

    Args:
        flags: values by field of PipelineConfig, plus `preset`; None is unset.
        file: TOML, YAML or JSON with the same names; dashes are equivalent to underscores.

    Raises:
        ValueError: a value is invalid; the message states what to change.
    """
    file_values = _resolve_aliases(read_file(file)) if file is not None else {}
    flag_values = _resolve_aliases({name: value for name, value in flags.items() if value is not None})
    preset = flag_values.pop("preset", None) or file_values.pop("preset", None) or DEFAULT_PRESET
    file_values.pop("preset", None)
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {preset!r}.")
    models = file_values.pop("models", {})
    stages = {**file_values.pop("stages", {}), **flag_values.pop("stages", {})}
    config = PipelineConfig(**{**PRESETS[preset], **file_values, **flag_values}, stages=MappingProxyType(stages))
    by_model = {name: _of_model(config, values) for name, values in models.items()}
    return replace(config, models=MappingProxyType(by_model)).check()


def _of_model(config: PipelineConfig, values: Mapping[str, Any]) -> PipelineConfig:
    """Returns the configuration of one model: its changes to its own preset, or else to the common configuration."""
    changes = _resolve_aliases(values)
    if "preset" in changes:
        config = PipelineConfig(**PRESETS[changes.pop("preset")])
    if "stages" in changes:
        changes["stages"] = MappingProxyType({**config.stages, **changes["stages"]})
    return replace(config, **changes)


def read_file(file: Path) -> dict[str, Any]:
    """Returns the validated fields of a file.

    Raises:
        ValueError: the file or a field is invalid; the message names the file.
    """
    try:
        document = _parsed(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{file} cannot be read: {reason}.") from error
    values = _checked(str(file), document, _ALLOWED)
    if (models := values.get("models")) is not None:
        if not isinstance(models, dict):
            raise ValueError(f"{file}: models must map each model to fields such as routing.")
        values["models"] = {
            str(name): _checked(f"{file}: models: {name}", of_model, _ALLOWED_OF_MODEL)
            for name, of_model in models.items()
        }
    return values


def _checked(location: str, document: Any, allowed: Sequence[str]) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError(f"{location} must contain fields such as routing, not {type(document).__name__}.")
    values = {str(name).replace("-", "_"): value for name, value in document.items()}
    for name, value in values.items():
        if name not in allowed:
            raise ValueError(f"{location}: {name} is unknown; valid fields are {', '.join(allowed)}.")
        _check_value(location, name, value)
    return values


def _resolve_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with aliases replaced; raises ValueError when an alias contradicts its option."""
    named = dict(values)
    direct, enabled = (named.pop(alias, None) for alias in ALIASES)
    if direct and named.setdefault("routing", "direct") != "direct":
        raise ValueError(f"direct-route contradicts routing {named['routing']}: leave one of them out.")
    if enabled is not None and named.setdefault("migration", enabled) is not enabled:
        raise ValueError("migration-enabled contradicts migration: leave one of them out.")
    return named


def parse_stages(texts: list[str]) -> dict[str, str]:
    """Parses `NAME=package.module:Class` texts into classes by name; raises ValueError for an invalid text."""
    stages: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        _check_stage(name, path)
        if name in stages:
            raise ValueError(f"stage {name} is set twice.")
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
            raise ValueError("YAML needs the package pyyaml; install it, or use TOML or JSON") from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
    raise ValueError("the file name must end in .toml, .yaml, .yml or .json")


_TYPES: Mapping[str, Any] = {
    "preset": PresetName,
    **get_type_hints(PipelineConfig),
    **dict.fromkeys(ALIASES, bool),
}
"""The types of the fields of a file. A further field of PipelineConfig needs no code here."""
_ALLOWED = tuple(_TYPES)
_ALLOWED_OF_MODEL = tuple(name for name in _ALLOWED if name != "models")


def _check_value(file: str, name: str, value: Any) -> None:
    kind = _TYPES[name]
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ValueError(f"{file}: {name} must be one of {', '.join(get_args(kind))}, not {value!r}.")
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{file}: {name} must be true or false, not {value!r}.")
    if kind is int and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{file}: {name} must be a whole number of at least 0, not {value!r}.")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{file}: {name} must be a text, not {value!r}.")
    if name == "stages":
        if not isinstance(value, dict):
            raise ValueError(f"{file}: stages must map each stage to a package.module:Class.")
        for stage, path in value.items():
            _check_stage(str(stage), path if isinstance(path, str) else "")


def _check_stage(name: str, path: str) -> None:
    if name not in get_args(StageName):
        raise ValueError(f"stage {name!r} is unknown; valid stages are {', '.join(get_args(StageName))}.")
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise ValueError(f"stage {name} must be {name}=package.module:Class, not {path!r}.")


def _conflicts(config: PipelineConfig) -> dict[str, bool]:
    """Returns the message of every possible conflict, and whether it applies."""
    engine_tokenizes = config.preprocessing == "engine"
    engine_detokenizes = config.postprocessing == "engine"
    return {
        "routing query-only returns token ids, which preprocessing engine produces only on a worker: set "
        "preprocessing to frontend, or routing to discover or direct.": config.routing == "query-only"
        and engine_tokenizes,
        "disaggregation require needs the token ids and the text in the gateway: set preprocessing and postprocessing "
        "to frontend, or disaggregation to auto.": config.disaggregation == "require"
        and (engine_tokenizes or engine_detokenizes),
        "stage tokenize replaces the preprocess services, which preprocessing engine does not use: set preprocessing "
        "to frontend, or leave the stage out.": "tokenize" in config.stages and engine_tokenizes,
        "stage postprocess replaces the postprocess services, which postprocessing engine does not use: set "
        "postprocessing to frontend, or leave the stage out.": "postprocess" in config.stages and engine_detokenizes,
        "stage route replaces the router's choice, which routing direct does not use: set routing to discover, or "
        "leave the stage out.": "route" in config.stages and config.routing == "direct",
        "stage place replaces the selection of workers, stage route included: leave stage route or stage place out.": {
            "route",
            "place",
        }
        <= config.stages.keys(),
    }
