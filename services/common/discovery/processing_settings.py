"""Whose code makes prompts' token ids and reads answers: this project's, or that of the engines.

The settings are the same in preprocess and postprocess, so that one flag means the same on both sides of the engine.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import MappingProxyType
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.discovery.model_discovery import ModelDiscoverySettings
from services.common.discovery.tokenizer_delivery import DiscoveredModel
from services.common.models import PROCESSORS, ModelSpec
from services.common.settings import CommaList

log = logging.getLogger(__name__)

NATIVE_CODE = MappingProxyType({"vllm": "vllm", "vllm-grpc": "vllm", "sglang": "sglang"})
"""By a worker's engine: whose code makes its ids and parses its text natively."""

ONLY_ONE = "only one can be set: vllm-processing, sglang-processing or native-framework-processing"
NO_TRTLLM = (
    "TensorRT-LLM's own processing is not part of this project; name a tokenizer class of your own in the model "
    "(NAME=SOURCE@package.module:Class) and a parser of your own in postprocess' own-parsers, as the section "
    "TensorRT-LLM of docs/preprocessing.md shows"
)
NOTHING_NATIVE = "the engine brings no code for prompts and answers: Sluice's own is used"


class ProcessingSettings(ModelDiscoverySettings):
    """Settings of the services before and after the engine."""

    models: CommaList = Field([], description="models that are served, NAME=SOURCE[@PROCESSOR] each")

    vllm_processing: bool = Field(
        False,
        description="use vLLM's own code here, for models that name no processor; set it in preprocess (prompts) and "
        "in postprocess (tool calls and reasoning)",
    )
    sglang_processing: bool = Field(False, description="the same with SGLang's own code")
    native_framework_processing: bool = Field(
        False,
        description="the same with the code of the engine that each model's workers run, where that engine has some; "
        "needs routers or workers",
    )
    trtllm_processing: bool = Field(
        False, description="not available: TensorRT-LLM's code is plugged in as classes of your own"
    )
    vllm_python: str = Field("", description="interpreter that has vllm, if not this one; of any environment")
    sglang_python: str = Field("", description="interpreter that has sglang, if not this one; of any environment")

    @field_validator("trtllm_processing")
    @classmethod
    def _trtllm_is_not_here(cls, wanted: bool) -> bool:
        if wanted:
            raise ValueError(NO_TRTLLM)
        return wanted

    @model_validator(mode="after")
    def _one_processing(self) -> Self:
        if self.vllm_processing + self.sglang_processing + self.native_framework_processing > 1:
            raise ValueError(ONLY_ONE)
        if self.native_framework_processing and not self.learns:
            raise ValueError("native-framework-processing needs routers or workers, which say what engine they run")
        return self

    @property
    def processing_engine(self) -> str:
        """The engine whose code is used for every model that names none; empty for none or for each model's own."""
        return "vllm" if self.vllm_processing else "sglang" if self.sglang_processing else ""

    @property
    def configured(self) -> list[ModelSpec]:
        """The models named; with models to learn, the default one is served only if it is named."""
        if self.learns and "models" not in self.model_fields_set:
            return []
        return [self._processed(ModelSpec.parse(text)) for text in self.models]

    @property
    def served(self) -> list[ModelSpec]:
        """The models served from the start; with native processing, models without a processor wait for a worker."""
        native = self.native_framework_processing
        return [spec for spec in self.configured if spec.processor or not native]

    def learned_spec(self, learned: DiscoveredModel) -> ModelSpec:
        """How a learned model is served: with the configured files where there are some, else as delivered."""
        spec = next((spec for spec in self.configured if spec.name == learned.spec.name), learned.spec)
        if self.native_framework_processing:
            return replace(spec, processor=NATIVE_CODE.get(learned.engine, ""))
        # What a card calls the processor is the format of its files, where it is not an engine's.
        named = spec is learned.spec and spec.processor in PROCESSORS and self.processing_engine
        return self._processed(replace(spec, processor="") if named else spec)

    def _processed(self, spec: ModelSpec) -> ModelSpec:
        """The model with the processor that the settings give to models that name none."""
        chosen = self.processing_engine
        return spec if spec.processor or not chosen else replace(spec, processor=chosen)

    def warn_without_native_code(self, learned: DiscoveredModel) -> None:
        """Logs that native processing changes nothing for a model whose engine brings no such code."""
        if self.native_framework_processing and learned.engine not in NATIVE_CODE:
            log.warning(NOTHING_NATIVE, extra={"model": learned.spec.name, "engine": learned.engine})
