"""Settings of the pipeline, which the gateway and `sluice up` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings

from services.common.settings import CommaList
from services.gateway.pipeline.config import (
    Disaggregation,
    PipelineConfig,
    PresetName,
    Routing,
    StageLocation,
    parse_stages,
    resolve,
)


def configured(settings: Mapping[str, Any]) -> PipelineConfig:
    """Returns the configuration of PipelineSettings by name; raises ValueError as `config.resolve`."""
    options = dict(settings)
    file = options.pop("pipeline_config")
    stages = parse_stages(list(options.pop("stage")))
    return resolve({**options, "stages": stages, "handler": options["handler"] or None}, file)


class PipelineSettings(BaseSettings):
    """The pipeline of requests; what is unset is as the preset and the file say."""

    preset: PresetName | None = Field(
        None,
        description="preset of the pipeline options below; full_discovery unless set here or in the pipeline "
        "configuration file; direct_execution: routing direct; query_only: routing query-only",
    )
    pipeline_config: Path | None = Field(
        None, description="TOML, YAML or JSON file with the pipeline options; flags take precedence"
    )
    preprocessing: StageLocation | None = Field(
        None, description="where prompts are tokenized: preprocess services (frontend, default) or the worker's engine"
    )
    postprocessing: StageLocation | None = Field(
        None,
        description="where tokens become text: postprocess services (frontend, default) or the worker's engine",
    )
    routing: Routing | None = Field(
        None,
        description="the router chooses the worker (discover, default); the request names the worker (direct); the "
        "response only reports the workers that would be chosen (query-only)",
    )
    disaggregation: Disaggregation | None = Field(
        None,
        description="use pairs of prefill and decode workers: when both are available (auto, default), always "
        "(require), never (off)",
    )
    disagg_min_tokens: int | None = Field(
        None,
        ge=0,
        description="prompts with fewer uncached tokens are not disaggregated where one worker can run them alone; 0 "
        "(default): as the router's setting",
    )
    stage: CommaList = Field(
        [],
        description="NAME=package.module:Class, a custom pipeline stage; NAME is tokenize, route, place or postprocess",
    )
    handler: str = Field("", description="package.module:Class, a custom pipeline")
    migration: bool | None = Field(
        None, description="continue generations whose worker is lost on another worker (default: on)"
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
