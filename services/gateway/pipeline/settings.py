"""Settings of the pipeline, which the gateway and `sluice up` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, create_model, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings

from services.common.settings.service import CommaList
from services.gateway.pipeline.config import PipelineConfig, PresetName, options, parse_stages, resolve


def configured(settings: Mapping[str, Any]) -> PipelineConfig:
    """Returns the configuration of PipelineSettings by name; raises ValueError as `config.resolve`."""
    flags = dict(settings)
    file = flags.pop("pipeline_config")
    stages = parse_stages(list(flags.pop("stage")))
    return resolve({**flags, "stages": stages}, file)


_FIELDS: dict[str, Any] = {
    name: (kind | None, Field(None, description=meaning, ge=0 if kind is int else None))
    for name, (kind, meaning) in options().items()
}
_Options = create_model("_Options", __base__=BaseSettings, **_FIELDS)


class PipelineSettings(_Options):
    """The pipeline of requests; what is unset is as the preset and the file say."""

    preset: PresetName | None = Field(
        None,
        description="preset of the pipeline options below; full_discovery unless set here or in the pipeline "
        "configuration file; direct_execution: routing direct; query_only: routing query-only",
    )
    pipeline_config: Path | None = Field(
        None, description="TOML, YAML or JSON file with the pipeline options; flags take precedence"
    )
    stage: CommaList = Field(
        [],
        description="NAME=package.module:Class, a custom pipeline stage; NAME is tokenize, route, place or postprocess",
    )

    @cached_property
    def pipeline(self) -> PipelineConfig:
        """The pipeline configuration from preset, file and flags; raises ValueError as `config.resolve`."""
        return configured({name: getattr(self, name) for name in PipelineSettings.model_fields})

    @model_validator(mode="after")
    def _pipeline_fits_together(self) -> Self:
        try:
            assert self.pipeline
        except ValueError as error:
            raise PydanticCustomError("pipeline", "{sentence}", {"sentence": str(error)}) from error
        return self
