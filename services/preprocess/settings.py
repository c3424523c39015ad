"""Settings of the preprocess service."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.common.discovery.processing_settings import ProcessingSettings
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE
from services.common.settings import CommaList, GrpcServiceSettings, settings_config
from services.preprocess.encoders.options import EncoderOptions
from services.preprocess.tokenizers.engine import EngineOptions


class PreprocessSettings(ProcessingSettings, GrpcServiceSettings):
    """Turns requests into token ids.

    Every flag is also an environment variable: --log-level is SLUICE_PREPROCESS_LOG_LEVEL.
    """

    model_config = settings_config("preprocess")

    models: CommaList = Field(
        [f"{DEFAULT_NAME}={DEFAULT_SOURCE}"],
        min_length=1,
        description="served models, each NAME=SOURCE[@PROCESSOR]; SOURCE is a folder, a hub id or mistral-common:NAME",
    )
    chat_templates: CommaList = Field(
        [], description="chat templates to use instead of those that came with models, each NAME=FILE"
    )
    preload: bool = Field(True, description="load all tokenizers before requests are welcome; no: on first use")
    load_wait_s: float = Field(60.0, gt=0, description="longest that one request waits for its tokenizer to load")
    tokenize_threads: int = Field(2, ge=1, le=64, description="threads for requests over inline-kb")
    inline_kb: int = Field(
        4,
        ge=0,
        description="requests up to this many KiB are served at once; a thread hop would cost more than they do",
    )
    max_waiting: int = Field(1024, ge=1, description="requests that may wait for a thread; more are shed")
    work_limit_s: float = Field(10.0, gt=0, description="longest that one request may wait and compute")
    max_prompt_mb: float = Field(4.0, gt=0, description="largest prompt, before and after the template, MiB of text")
    fast_tokenizers: bool = Field(
        True, description="use a faster library where it is installed and a self-check proves equal ids"
    )
    cache_mb: int = Field(64, ge=0, description="MiB for each model that remember ids of earlier prompts; 0: none")
    template_limit_s: float = Field(2.0, gt=0, description="longest that a chat template may run")
    template_processes: int = Field(1, ge=1, le=16, description="processes that run templates sent by clients")
    worker_template_processes: int = Field(
        16,
        ge=1,
        le=1024,
        description="processes that run the templates of models learned from workers, one for each model in use",
    )
    template_memory_mb: int = Field(512, ge=128, description="address space of such a process, MiB")
    trust_worker_templates: bool = Field(
        False,
        description="run the templates of models learned from workers in this process, where a hostile one can use up "
        "its memory and time",
    )

    engine_processes: int = Field(1, ge=1, le=64, description="processes of an engine's code for each model")
    engine_memory_mb: int = Field(
        2048, ge=128, description="MiB that such a process may take beyond what its tokenizer needs"
    )
    engine_start_s: float = Field(120.0, gt=0, description="longest that such a process may take to start")

    @model_validator(mode="after")
    def _models_can_be_read(self) -> Self:
        names = [spec.name for spec in self.configured]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models lists {', '.join(twice)} more than once")
        return self

    @model_validator(mode="after")
    def _templates_are_of_models(self) -> Self:
        for text in self.chat_templates:
            name, _, file = text.partition("=")
            if not file or name not in {spec.name for spec in self.served}:
                raise ValueError(f"chat template {text!r} is not NAME=FILE with the name of a served model")
        return self

    def template_file(self, model: str) -> Path | None:
        """The chat template given for a model; None for the model's own."""
        given = dict(text.split("=", 1) for text in self.chat_templates)
        return Path(given[model]) if model in given else None

    @property
    def engines(self) -> dict[str, EngineOptions]:
        """How the processes of each engine are run."""
        return {
            engine: EngineOptions(
                python,
                self.engine_processes,
                self.work_limit_s,
                self.template_limit_s,
                self.engine_start_s,
                self.engine_memory_mb,
            )
            for engine, python in (("vllm", self.vllm_python), ("sglang", self.sglang_python))
        }

    @property
    def encoder_options(self) -> EncoderOptions:
        """What tokenizers may do to be fast."""
        return EncoderOptions(self.fast_tokenizers, self.cache_mb << 20)

    @property
    def max_prompt_bytes(self) -> int:
        """`max_prompt_mb` in bytes."""
        return int(self.max_prompt_mb * (1 << 20))
