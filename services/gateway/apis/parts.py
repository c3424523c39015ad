"""What an API is built from: the parts of the gateway that an extension may use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from services.common.base.tasks import TaskOwner
from services.common.net.intake.pace import BodyPace
from services.gateway.admission.gate import Gate
from services.gateway.apis.openai.embeddings import EmbeddingOperations
from services.gateway.apis.openai.operations import OpenAIOperations
from services.gateway.apis.routes import ApiRoutes
from services.gateway.backends.workers.fleet_control import FleetControl
from services.gateway.backends.workers.registry import WorkerRegistry
from services.gateway.operations.runner import AnswerRunner
from services.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ApiParts:
    """The parts of a gateway process for the APIs that it serves.

    Attributes:
        runner: runs generations and turns them into answers.
        openai: runs chat completions and completions.
        embeddings: computes vectors and classes.
        fleet: runs control actions on workers.
        pace: schedules large bodies.
        tasks: owns background tasks; the death of one stops the gateway.
        background: started with the gateway, each with the name of its task.
        closers: called when the gateway stops.
    """

    settings: GatewaySettings
    registry: WorkerRegistry
    gate: Gate
    runner: AnswerRunner
    openai: OpenAIOperations
    embeddings: EmbeddingOperations
    fleet: FleetControl
    pace: BodyPace
    tasks: TaskOwner
    background: list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]] = field(default_factory=list)
    closers: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


AddApi = Callable[[ApiParts, ApiRoutes], None]
"""What an entry point of the group `sluice.apis` names: adds an API's routes."""
