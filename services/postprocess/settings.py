"""Settings of the postprocess service."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.base.errors import SluiceError
from services.common.discovery.processing_settings import ProcessingSettings
from services.common.packages.model_files import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.common.settings.service import CommaList, GrpcServiceSettings, settings_config
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.engine_names import ENGINES, engine_of
from services.postprocess.parsers.registry import ParserRegistry


class PostprocessSettings(ProcessingSettings, GrpcServiceSettings):
    """Converts token ids to text, and parses reasoning and tool calls.

    Every flag can also be set by environment variable: --log-level by SLUICE_POSTPROCESS_LOG_LEVEL.
    """

    model_config = settings_config("postprocess")

    listen: str = Field("127.0.0.1:50053", description="host:port of the gRPC server")
    models: CommaList = Field(
        [f"{DEFAULT_NAME}={DEFAULT_SOURCE}"],
        description="models to serve, NAME=SOURCE[@PROCESSOR]; SOURCE is a folder, a hub id or mistral-common:NAME; "
        "may be empty with routers",
    )
    tool_parsers: CommaList = Field(
        [],
        description="tool parser that 'auto' selects, MODEL=PARSER; default: detected from the model's template",
    )
    reasoning_parsers: CommaList = Field(
        [],
        description="reasoning parser that 'auto' selects, MODEL=PARSER; default: detected from the model's template",
    )
    own_parsers: CommaList = Field(
        [],
        description="custom parsers available to streams, module:Class; each runs in a separate process",
    )
    native_parsers: CommaList = Field(
        [],
        description="engines whose parsers are available to streams (vllm:hermes, sglang:qwen25) and preferred by "
        "'auto': vllm, sglang; each engine runs in a separate process",
    )

    @field_validator("models")
    @classmethod
    def _models_parse(cls, models: list[str]) -> list[str]:
        names = [ModelSpec.parse(text).name for text in models]
        if len(set(names)) < len(names):
            raise ValueError("two models have the same name; use unique names")
        return models

    @model_validator(mode="after")
    def _models_or_routers(self) -> Self:
        if not self.models and not self.routers and not self.workers:
            raise ValueError("--models is empty; set at least one model, or routers from which they are discovered")
        return self

    @field_validator("own_parsers")
    @classmethod
    def _own_parsers_have_a_class(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} does not have the form module:Class")
        return names

    @field_validator("native_parsers")
    @classmethod
    def _engines_are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ENGINES:
                raise ValueError(f"{name!r} is not an engine with parsers; use one of {', '.join(ENGINES)}")
        return names

    @model_validator(mode="after")
    def _check_parsers(self) -> Self:
        for names in self.parsers.values():
            try:
                ParserRegistry(self.own_parsers, self.engines).check(names)
            except SluiceError as error:
                raise ValueError(error.message) from None
        return self

    @property
    def parsers(self) -> dict[str, ParserNames]:
        """Parsers that `auto` selects, for models with configured parsers."""
        tool, reasoning = _by_model(self.tool_parsers), _by_model(self.reasoning_parsers)
        return {model: ParserNames(tool.get(model, ""), reasoning.get(model, "")) for model in {**tool, **reasoning}}

    @property
    def engines(self) -> dict[str, str]:
        """Engines whose parsers are started with the service, and their interpreters; empty: this one."""
        configured = (engine_of(name) for names in self.parsers.values() for name in (names.tool, names.reasoning))
        native = (engine for spec in self.served for engine in self.native_of(spec))
        needed = {*self.native_parsers, self.processing_engine, *configured, *native} - {""}
        return {engine: self._python_of(engine) for engine in sorted(needed)}

    @property
    def later_engines(self) -> dict[str, str]:
        """Engines whose parsers are started with the first model that needs them, and their interpreters."""
        native = ENGINES if self.native_framework_processing else ()
        return {engine: self._python_of(engine) for engine in sorted(set(native) - self.engines.keys())}

    def native_of(self, spec: ModelSpec) -> Sequence[str]:
        """Returns the engines whose parsers `auto` prefers for a model."""
        native = self.processing_engine or self.native_framework_processing
        engine = [spec.processor] if native and spec.processor in ENGINES else []
        return [*engine, *self.native_parsers]

    def _python_of(self, engine: str) -> str:
        return {"vllm": self.vllm_python, "sglang": self.sglang_python}[engine]


def _by_model(texts: list[str]) -> dict[str, str]:
    """Parses MODEL=PARSER entries; raises ValueError for invalid ones."""
    found = {}
    for text in texts:
        model, _, name = text.rpartition("=")
        if not model or not name:
            raise ValueError(f"{text!r} does not have the form MODEL=PARSER")
        found[model] = name
    return found
