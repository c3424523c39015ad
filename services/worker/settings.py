"""Settings of the worker service."""

from __future__ import annotations

import sys
from typing import Literal, Self

from pydantic import Field, FilePath, field_validator

from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE, ModelSpec
from services.common.security.settings import RouterTokenSettings
from services.common.settings import Address, AddressList, CommaList, GrpcServiceSettings, settings_config
from services.worker.processing_options import ProcessingOptions


class WorkerSettings(RouterTokenSettings, GrpcServiceSettings):
    """Sluice worker: hosts one engine and serves its tokens.

    Every flag is also an environment variable: --log-level is SLUICE_WORKER_LOG_LEVEL.
    """

    model_config = settings_config("worker")

    listen: str = Field("127.0.0.1:50061", description="host:port of the gRPC server")
    worker_id: str = Field("", description="unique name of this worker; empty: host name, or the container's, and port")
    advertise: Address = Field("", description="host:port where gateways reach this worker; empty: found out")
    routers: AddressList = Field([], description="host:port of the routers to register with; empty: stand alone")
    role: Literal["aggregated", "prefill", "decode"] = Field("aggregated", description="part this worker plays")
    grace_s: float = Field(0.5, ge=0, le=60, description="seconds between leaving discovery and refusing requests")

    max_live: int = Field(0, ge=0, description="requests alive at once; more are refused as overloaded; 0: no limit")
    canary_s: float = Field(
        30.0, ge=0, description="after this many seconds without a finished generation a tiny one is tried; 0: never"
    )
    canary_timeout_s: float = Field(10.0, gt=0, description="seconds that the tiny generation may take")
    canary_failures: int = Field(2, ge=1, description="failures in a row after which the worker leaves discovery")
    strict_streams: bool = Field(
        False, description="raise inside an engine that breaks its contract, for tests; otherwise its request fails"
    )

    max_grammar_kb: int = Field(
        2048,
        ge=1,
        description="longest constraint on an answer: schema, pattern, grammar or all texts of a choice, Ki characters",
    )
    grammar_timeout_s: float = Field(
        10.0, gt=0, description="longest that a request waits for the worker to compile or check its grammar"
    )
    grammar_threads: int = Field(2, ge=1, le=64, description="grammars that the worker compiles or checks at once")

    processing: Literal["none", "prompts", "full"] = Field(
        "prompts",
        description="what is done beside the engine: prompts of text and chats are made; full: text and tool calls are "
        "made of its tokens too. When it is set and the tokenizer cannot be loaded, the worker does not start",
    )
    processing_cache_mb: int = Field(16, ge=0, description="MiB that remember ids of earlier prompts; 0: none")

    engine: str = Field("mock", description="engine by name, or package.module:Class")
    engine_args: str = Field(
        "", description="options of the engine's own: a JSON object, or key=value,key=value; flags may also follow --"
    )
    model: str = Field(
        f"{DEFAULT_NAME}={DEFAULT_SOURCE}",
        description="model to serve, as NAME=SOURCE[@PROCESSOR]; SOURCE is a hub id, a folder or mistral-common:NAME",
    )
    tool_parser: str = Field(
        "", description="what the tool parser 'auto' means for this model; empty: its template tells"
    )
    reasoning_parser: str = Field("", description="the same for the reasoning parser")
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
    timing: Literal["modelled", "polynomial", "fixed", "table"] = Field(
        "modelled", description="mock engine: how long a step takes; modelled and polynomial are the same"
    )
    timing_file: str = Field("", description="mock engine, table timing: JSON file with measured points")
    fixed_step_ms: float = Field(5.0, ge=0, description="mock engine, fixed timing: milliseconds of a step")
    fixed_prefill_us: float = Field(
        20.0, ge=0, description="mock engine, fixed timing: microseconds per prompt token computed"
    )
    fault: CommaList = Field([], description="mock engine: faults from the start, such as slow=5,error_after=3")
    transfer_gbps: float = Field(
        100.0, gt=0, description="mock engine, decode role: gigabits a second at which a prompt's cache arrives"
    )
    kv_token_bytes: int = Field(131_072, ge=1, description="mock engine: bytes of KV cache of one token")
    data_parallel_size: int = Field(
        1, ge=1, le=64, description="mock engine: data-parallel ranks, each with blocks and a batch of its own"
    )
    embedding_width: int = Field(256, ge=1, le=65_536, description="mock engine: dimensions of an embedding")

    engine_flags: tuple[str, ...] = ()
    """What followed `--` on the command line, for the engine's own parser; no flag of its own."""

    @classmethod
    def load(cls, argv: list[str] | None = None) -> Self:
        """As ServiceSettings.load; what follows `--` is left to the engine."""
        given = sys.argv[1:] if argv is None else argv
        end = given.index("--") if "--" in given else len(given)
        return super().load(given[:end]).model_copy(update={"engine_flags": tuple(given[end + 1 :])})

    @field_validator("model")
    @classmethod
    def _model_is_a_spec(cls, value: str) -> str:
        ModelSpec.parse(value)
        return value

    @property
    def processing_options(self) -> ProcessingOptions:
        """What is done beside the engine."""
        return ProcessingOptions(
            self.processing,
            "processing" in self.model_fields_set,
            self.processing_cache_mb << 20,
        )

    @property
    def spec(self) -> ModelSpec:
        """The model as name, source and processor."""
        return ModelSpec.parse(self.model)
