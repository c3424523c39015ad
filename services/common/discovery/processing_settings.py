"""Selects the code that tokenizes prompts and parses outputs: Sluice's own, or an engine's.

The settings are shared by preprocess and postprocess, so that a flag has the same meaning on both sides of the engine.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import MappingProxyType
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.discovery.discovered_models import DiscoveredModel
from services.common.discovery.model_discovery import ModelDiscoverySettings
from services.common.packages.model_files import PROCESSORS, ModelSpec
from services.common.settings.service import CommaList

log = logging.getLogger(__name__)

NATIVE_CODE = MappingProxyType({"vllm": "vllm", "vllm-grpc": "vllm", "sglang": "sglang"})
"""By a worker's engine: the engine whose code tokenizes and parses for it."""

ONLY_ONE = "set only one of vllm-processing, sglang-processing and native-framework-processing"
NO_TRTLLM = (
    "TensorRT-LLM's processing code is not supported; name a custom tokenizer class in the model "
    "(NAME=SOURCE@package.module:Class) and a custom parser in the postprocess setting own-parsers, as described under "
    "TensorRT-LLM in docs/preprocessing.md"
)
NOTHING_NATIVE = "the engine has no processing code of its own: using Sluice's"


class ProcessingSettings(ModelDiscoverySettings):
    """Settings shared by the services before and after the engine."""

    models: CommaList = Field([], description="models to serve, each as NAME=SOURCE[@PROCESSOR]")

    vllm_processing: bool = Field(
        False,
        description="use vLLM's code for models without a processor; preprocess (prompts) and postprocess (tool calls "
        "and reasoning) must both use it",
    )
    sglang_processing: bool = Field(
        False,
        description="use SGLang's code for models without a processor; preprocess and postprocess must both use it",
    )
    native_framework_processing: bool = Field(
        False,
        description="use the code of the engine that each model's workers run, if that engine has any; requires "
        "routers or workers; preprocess and postprocess must both use it",
    )
    trtllm_processing: bool = Field(
        False, description="not supported: plug in TensorRT-LLM's code as a custom tokenizer class and parser"
    )
    vllm_python: str = Field("", description="Python interpreter of an environment with vllm; empty: this one")
    sglang_python: str = Field("", description="Python interpreter of an environment with sglang; empty: this one")

    @field_validator("trtllm_processing")
    @classmethod
    def _reject_trtllm(cls, value: bool) -> bool:
        if value:
            raise ValueError(NO_TRTLLM)
        return value

    @model_validator(mode="after")
    def _check_processing(self) -> Self:
        if self.vllm_processing + self.sglang_processing + self.native_framework_processing > 1:
            raise ValueError(ONLY_ONE)
        if self.native_framework_processing and not self.learns:
            raise ValueError("native-framework-processing requires routers or workers, which report their engine")
        return self

    @property
    def processing_engine(self) -> str:
        """The engine whose code serves models without a processor; empty for none or for each model's own engine."""
        return "vllm" if self.vllm_processing else "sglang" if self.sglang_processing else ""

    @property
    def configured(self) -> list[ModelSpec]:
        """The configured models; with discovery on, the default model only if it is listed."""
        if self.learns and "models" not in self.model_fields_set:
            return []
        return [self._with_processor(ModelSpec.parse(text)) for text in self.models]

    @property
    def served(self) -> list[ModelSpec]:
        """The models served from the start; with native processing, models without a processor wait for a worker."""
        native = self.native_framework_processing
        return [spec for spec in self.configured if spec.processor or not native]

    def learned_spec(self, learned: DiscoveredModel) -> ModelSpec:
        """Returns how a discovered model is served: with the configured files if any, else as delivered."""
        spec = next((spec for spec in self.configured if spec.name == learned.spec.name), learned.spec)
        if self.native_framework_processing:
            return replace(spec, processor=NATIVE_CODE.get(learned.engine, ""))
        # A card's processor, unless it is an engine's, only names the format of its files.
        named = spec is learned.spec and spec.processor in PROCESSORS and self.processing_engine
        return self._with_processor(replace(spec, processor="") if named else spec)

    def _with_processor(self, spec: ModelSpec) -> ModelSpec:
        """Returns the model with the processor that the settings assign to models without one."""
        chosen = self.processing_engine
        return spec if spec.processor or not chosen else replace(spec, processor=chosen)

    def warn_without_native_code(self, learned: DiscoveredModel) -> None:
        """Logs a warning when native processing has no effect because the model's engine has no such code."""
        if self.native_framework_processing and learned.engine not in NATIVE_CODE:
            log.warning(NOTHING_NATIVE, extra={"model": learned.spec.name, "engine": learned.engine})
