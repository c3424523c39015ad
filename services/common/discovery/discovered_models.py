"""Models discovered from workers: their settings, their limits, and what is known of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings

from services.common.base.budgets import Budget
from services.common.discovery.tokenizer_store import default_folder
from services.common.packages.model_files import ModelSpec
from services.common.settings.service import AddressList


class DeliverySettings(BaseSettings):
    """Where models that are not configured come from."""

    routers: AddressList = Field(
        [], description="host:port of routers; the models of their workers are served without being listed in --models"
    )
    workers: AddressList = Field(
        [], description="host:port of workers whose models are served; for use without a router"
    )
    tokenizer_cache: Path = Field(
        default_factory=default_folder,
        description="folder for tokenizers received from workers; may be shared and persistent",
    )
    max_discovered_mb: int = Field(
        4096,
        ge=64,
        description="memory for the tokenizers of models discovered from workers, estimated from their files, MiB; the "
        "least recently used makes room for one that is requested. Models with the same files and template share one",
    )

    @property
    def learns(self) -> bool:
        """Whether models are discovered from workers."""
        return bool(self.routers or self.workers)


@dataclass(frozen=True)
class DiscoveredModel:
    """A model served by a worker, with its tokenizer on the local disk; `engine` is what the worker runs."""

    spec: ModelSpec
    engine: str
    fingerprint: str

    @property
    def declared(self) -> tuple[str, str, str]:
        """The chat template, tool parser and reasoning parser, as `ServedModel.declared`."""
        return self.spec.chat_template, self.spec.tool_parser, self.spec.reasoning_parser


@dataclass(frozen=True)
class RetainedModel:
    """Limits of discovered models; see DeliverySettings.

    Attributes:
        models: maximum number.
        grace_s: seconds one stays without workers.
        memory: limit for the estimated memory of all tokenizers, bytes.
        model_bytes: memory that each tokenizer may take beside its files.
    """

    models: int = 1024
    grace_s: float = 300.0
    memory: Budget = field(default_factory=lambda: Budget("tokenizer_memory", 4 << 30, "--max-discovered-mb"))
    model_bytes: int = 0
