"""Settings of the postprocess service."""

from __future__ import annotations

from pydantic import Field, field_validator

from services.common.learning import LearningSettings
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.common.settings import CommaList, GrpcServiceSettings, settings_config


class PostprocessSettings(LearningSettings, GrpcServiceSettings):
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
    max_message_tokens: int = Field(1 << 20, ge=1, description="tokens in one message")
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

    @property
    def specs(self) -> list[ModelSpec]:
        """The models named; with models to learn from workers, the default one is served only if it is named."""
        if self.learns and "models" not in self.model_fields_set:
            return []
        return [ModelSpec.parse(text) for text in self.models]
