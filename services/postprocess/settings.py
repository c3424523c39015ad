"""Settings of the postprocess service."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.discovery.processing_settings import ProcessingSettings
from services.common.errors import SluiceError
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.common.settings import CommaList, GrpcServiceSettings, settings_config
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.engines import ENGINES, engine_of
from services.postprocess.parsers.registry import Registry


class PostprocessSettings(ProcessingSettings, GrpcServiceSettings):
    """Turns token ids into text. Every flag is also an environment variable: --log-level is
    SLUICE_POSTPROCESS_LOG_LEVEL."""

    model_config = settings_config("postprocess")

    listen: str = Field("127.0.0.1:50053", description="host:port of the gRPC server")
    models: CommaList = Field(
        [f"{DEFAULT_NAME}={DEFAULT_SOURCE}"],
        description="models to detokenize for, NAME=SOURCE[@PROCESSOR]; SOURCE is a folder, a hub id or "
        "mistral-common:NAME",
    )
    preload: bool = Field(True, description="load all models before reporting healthy; off: on first use")
    load_timeout_s: float = Field(300.0, gt=0, description="seconds that loading one model may take")
    max_streams: int = Field(16_384, ge=1, description="streams that may live on one session at a time")
    max_stop_strings: int = Field(1_000, ge=0, description="stop strings of one stream")
    max_stop_chars: int = Field(8_192, ge=0, description="code points of all stop strings of one stream together")
    tool_parsers: CommaList = Field(
        [],
        description="what the tool parser 'auto' means, MODEL=PARSER; by default the model's template tells",
    )
    reasoning_parsers: CommaList = Field([], description="the same for the reasoning parser")
    own_parsers: CommaList = Field(
        [],
        description="parsers of your own that streams may name, module:Class; each runs in a process of its own",
    )
    native_parsers: CommaList = Field(
        [],
        description="engines whose own parsers streams may name (vllm:hermes, sglang:qwen25) and 'auto' prefers: vllm, "
        "sglang; each runs in a process of its own",
    )
    parser_time_s: float = Field(
        2.0, gt=0, description="seconds a parser of your own or an engine's may take for one message's text"
    )
    parser_memory_mb: int = Field(512, ge=16, description="memory a parser's process may take beyond its start, MiB")
    max_tools_kb: int = Field(1024, ge=1, description="tool descriptions of one stream, KiB")
    max_message_tokens: int = Field(1 << 20, ge=1, description="tokens in one message")
    max_row_tokens: int = Field(1 << 16, ge=1, description="tokens of one stream in one message")
    max_waiting_tokens: int = Field(
        1 << 16, ge=1, description="tokens one stream may hold while its model is still loading"
    )
    max_backlog: int = Field(
        1 << 20, ge=1, description="tokens and answers a session may hold for a caller that does not read"
    )

    @field_validator("models")
    @classmethod
    def _models_parse(cls, models: list[str]) -> list[str]:
        names = [ModelSpec.parse(text).name for text in models]
        if not names:
            raise ValueError("name at least one model")
        if len(set(names)) < len(names):
            raise ValueError("two models have the same name")
        return models

    @field_validator("own_parsers")
    @classmethod
    def _own_parsers_have_a_class(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} is not module:Class")
        return names

    @field_validator("native_parsers")
    @classmethod
    def _engines_are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ENGINES:
                raise ValueError(f"{name!r} is no engine with parsers; there is {', '.join(ENGINES)}")
        return names

    @model_validator(mode="after")
    def _parsers_are_there(self) -> Self:
        for names in self.parsers.values():
            try:
                Registry(self.own_parsers, self.engines).check(names)
            except SluiceError as error:
                raise ValueError(error.message) from None
        return self

    @property
    def parsers(self) -> dict[str, ParserNames]:
        """What `auto` means, for the models where it is given."""
        tool, reasoning = _by_model(self.tool_parsers), _by_model(self.reasoning_parsers)
        return {model: ParserNames(tool.get(model, ""), reasoning.get(model, "")) for model in {**tool, **reasoning}}

    @property
    def engines(self) -> dict[str, str]:
        """The engines whose parsers run here from the start, with the interpreter of each; empty for this one."""
        named = (engine_of(name) for names in self.parsers.values() for name in (names.tool, names.reasoning))
        native = (engine for spec in self.served for engine in self.native_of(spec))
        wanted = {*self.native_parsers, self.processing_engine, *named, *native} - {""}
        return {engine: self._python_of(engine) for engine in sorted(wanted)}

    @property
    def later_engines(self) -> dict[str, str]:
        """The same for engines whose parsers start with the first model that needs them."""
        native = ENGINES if self.native_framework_processing else ()
        return {engine: self._python_of(engine) for engine in sorted(set(native) - self.engines.keys())}

    def native_of(self, spec: ModelSpec) -> Sequence[str]:
        """The engines whose own parsers `auto` prefers for a model."""
        native = self.processing_engine or self.native_framework_processing
        own = [spec.processor] if native and spec.processor in ENGINES else []
        return [*own, *self.native_parsers]

    def _python_of(self, engine: str) -> str:
        return {"vllm": self.vllm_python, "sglang": self.sglang_python}[engine]


def _by_model(texts: list[str]) -> dict[str, str]:
    """Reads MODEL=PARSER; ValueError says what is wrong."""
    found = {}
    for text in texts:
        model, _, name = text.rpartition("=")
        if not model or not name:
            raise ValueError(f"{text!r} is not MODEL=PARSER")
        found[model] = name
    return found
