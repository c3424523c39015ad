"""Settings of the worker service."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from pydantic import Field, FilePath, field_validator

from services.common.packages.model_files import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.common.settings.service import Address, AddressList, CommaList, GrpcServiceSettings, settings_config

Level = Literal["none", "prompts", "full"]


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Resource limits of tokenization.

    Attributes:
        max_prompt_bytes: size of one prompt as received.
        max_held_bytes: total size of all prompts being tokenized, without those whose callers have cancelled, of which
            each thread may still process one.
        threads: prompts tokenized concurrently.
        max_waiting: prompts that may wait for a thread.
        limit_s: seconds from the arrival of a prompt to its token ids.
    """

    max_prompt_bytes: int = 4 << 20
    max_held_bytes: int = 64 << 20
    threads: int = 2
    max_waiting: int = 1024
    limit_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ProcessingOptions:
    """What the worker processes locally.

    Attributes:
        level: nothing, prompts, or prompts and output text.
        required: fail to start when the tokenizer cannot be loaded; otherwise the worker then serves token ids only.
        cache_bytes: memory for the token ids of earlier prompts.
        bounds: resource limits of tokenization.
    """

    level: Level = "prompts"
    required: bool = False
    cache_bytes: int = 16 << 20
    bounds: PromptBounds = field(default_factory=PromptBounds)


class WorkerSettings(GrpcServiceSettings):
    """Sluice worker: runs one engine and streams its tokens.

    Every flag can also be set by an environment variable: --log-level is SLUICE_WORKER_LOG_LEVEL.
    """

    model_config = settings_config("worker")

    max_message_mb: ClassVar[int] = 64  # tensors of prompts

    listen: str = Field("127.0.0.1:50061", description="host:port that the gRPC server listens on")
    worker_id: str = Field(
        "", description="unique name of this worker; empty: the host or container name, followed by the port"
    )
    http_address: Address = Field(
        "",
        description="host:port of the engine's own HTTP server, to which an endpoint picker may send requests; empty: "
        "none",
    )
    worker_labels: CommaList = Field(
        [], description="NAME=VALUE, such as zone=eu-1, for composed policies of the router; repeatable"
    )
    advertise: Address = Field(
        "", description="host:port at which gateways reach this worker; empty: determined automatically"
    )
    routers: AddressList = Field(
        [], description="host:port of the routers to register with; empty: do not register with a router"
    )
    role: Literal["aggregated", "prefill", "decode"] = Field(
        "aggregated", description="stages of a request that this worker runs: both, prefill only or decode only"
    )
    grace_s: float = Field(0.5, ge=0, le=60, description="seconds between leaving discovery and rejecting requests")

    max_live: int = Field(
        0, ge=0, description="maximum number of concurrent requests; more are rejected as overloaded; 0: no limit"
    )
    canary_s: float = Field(
        30.0, ge=0, description="seconds without a finished generation before a one-token canary runs; 0: no canaries"
    )

    processing: Literal["none", "prompts", "full"] = Field(
        "prompts",
        description="processing in the worker besides the engine; none: token ids only; prompts: tokenize text and "
        "chat prompts; full: also return text and tool calls. When set explicitly, the worker does not start if the "
        "tokenizer cannot be loaded",
    )

    media_cache_mb: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="size in MiB of the media files kept for prompts, unfinished uploads included",
    )

    engine: str = Field("mock", description="name of the engine, or package.module:Class of a custom one")
    engine_args: str = Field(
        "",
        description="options for the engine: a JSON object, or key=value,key=value; engine flags may also follow --",
    )
    model: str = Field(
        f"{DEFAULT_NAME}={DEFAULT_SOURCE}",
        description="model to serve, as NAME=SOURCE[@PROCESSOR]; SOURCE is a hub id, a folder or mistral-common:NAME",
    )
    tool_parser: str = Field(
        "", description="tool parser that 'auto' selects for this model; empty: detected from the chat template"
    )
    reasoning_parser: str = Field(
        "", description="reasoning parser that 'auto' selects for this model; empty: detected from the chat template"
    )
    chat_template: FilePath | None = Field(
        None, description="Jinja file to use instead of the chat template in the model's files"
    )
    adapters: CommaList = Field([], description="names of LoRA adapters to serve")
    context_length: int = Field(
        0, ge=0, description="maximum number of prompt and output tokens; 0: taken from the model's files"
    )

    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV-cache block")
    total_blocks: int = Field(16_384, ge=2, description="number of KV-cache blocks")
    max_sequences: int = Field(256, ge=1, description="maximum number of requests in the running batch")
    max_batched_tokens: int = Field(8_192, ge=1, description="maximum number of tokens in an engine step")
    max_waiting: int = Field(
        2_048, ge=0, description="maximum number of waiting requests; more are rejected as overloaded"
    )

    speedup: float = Field(1.0, gt=0, description="mock engine: factor by which simulated time runs faster")
    engine_flags: tuple[str, ...] = ()
    """Command-line arguments after `--`, passed to the engine's own parser; not a flag itself."""

    @classmethod
    def load(cls, argv: list[str] | None = None) -> Self:
        """Loads the settings as ServiceSettings.load does; arguments after `--` become `engine_flags`."""
        arguments = sys.argv[1:] if argv is None else argv
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return super().load(arguments[:end]).model_copy(update={"engine_flags": tuple(arguments[end + 1 :])})

    @field_validator("model")
    @classmethod
    def _model_is_a_spec(cls, value: str) -> str:
        ModelSpec.parse(value)
        return value

    @field_validator("worker_labels")
    @classmethod
    def _labels_have_values(cls, labels: list[str]) -> list[str]:
        for label in labels:
            name, _, value = label.partition("=")
            if not name.strip() or not value.strip():
                raise ValueError(f"{label!r} is not NAME=VALUE, such as zone=eu-1")
        return labels

    @property
    def label_values(self) -> dict[str, str]:
        """The values of the labels by name."""
        pairs = (label.partition("=") for label in self.worker_labels)
        return {name.strip(): value.strip() for name, _, value in pairs}

    @property
    def processing_options(self) -> ProcessingOptions:
        """The options of local processing."""
        return ProcessingOptions(self.processing, "processing" in self.model_fields_set)

    @property
    def spec(self) -> ModelSpec:
        """The name, source and processor of the model."""
        return ModelSpec.parse(self.model)
