"""Settings of the worker service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FilePath, field_validator

from services.common.access import RouterTokenSettings
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.common.settings import CommaList, GrpcServiceSettings, settings_config


class WorkerSettings(RouterTokenSettings, GrpcServiceSettings):
    """Sluice worker: hosts one engine and serves its tokens.

    Every flag is also an environment variable: --log-level is SLUICE_WORKER_LOG_LEVEL.
    """

    model_config = settings_config("worker")

    listen: str = Field("127.0.0.1:50061", description="host:port of the gRPC server")
    worker_id: str = Field("", description="unique name of this worker; empty: host name and port")
    advertise: str = Field("", description="host:port where gateways reach this worker; empty: found out")
    routers: CommaList = Field([], description="host:port of the routers to register with; empty: stand alone")
    role: Literal["aggregated", "prefill", "decode"] = Field("aggregated", description="part this worker plays")
    grace_s: float = Field(0.5, ge=0, le=60, description="seconds between leaving discovery and refusing requests")

    engine: str = Field("mock", description="engine by name, or package.module:Class")
    model: str = Field(
        f"{DEFAULT_NAME}={DEFAULT_SOURCE}",
        description="model to serve, as NAME=SOURCE[@PROCESSOR]; SOURCE is a hub id, a folder or mistral-common:NAME",
    )
    chat_template: FilePath | None = Field(
        None, description="Jinja file to use instead of the chat template in the model's files"
    )
    adapters: CommaList = Field([], description="names of LoRA adapters to serve")
    context_length: int = Field(0, ge=0, description="most tokens of prompt and output; 0: as the model's files say")

    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV-cache block")
    total_blocks: int = Field(16_384, ge=2, description="KV-cache blocks")
    max_sequences: int = Field(256, ge=1, description="requests that run at once")
    max_batched_tokens: int = Field(8_192, ge=1, description="tokens of one engine step")
    max_waiting: int = Field(2_048, ge=0, description="requests that may wait; more are refused as overloaded")

    speedup: float = Field(1.0, gt=0, description="mock engine: how much faster its clock runs")
    timing: Literal["modelled", "fixed"] = Field("modelled", description="mock engine: how long a step takes")
    fixed_step_ms: float = Field(5.0, ge=0, description="mock engine, fixed timing: milliseconds of a step")
    fixed_prefill_us: float = Field(
        20.0, ge=0, description="mock engine, fixed timing: microseconds per prompt token computed"
    )

    @field_validator("model")
    @classmethod
    def _model_is_a_spec(cls, value: str) -> str:
        ModelSpec.parse(value)
        return value

    @property
    def spec(self) -> ModelSpec:
        """The model as name, source and processor."""
        return ModelSpec.parse(self.model)
