"""The policies of a router by name: built-in ones, and those of its policy file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from services.common.base.errors import invalid, quoted
from services.router.scheduling.policies.built_in import BuiltInPolicy, all_policies
from services.router.scheduling.policies.composition import Composition, Ranking, StageFailed, StagePipelines
from services.router.scheduling.policies.config import NO_POLICIES, PolicyFile
from services.router.scheduling.policies.contract import Candidate, PolicyRequest
from services.router.scheduling.policies.isolated.process import PolicyFailed, PolicyProcess

MAX_RANKING_S = 0.1
"""Seconds of a ranking by stages that are not built in, waiting included; then the built-in policy decides."""
MAX_MEMORY_MB = 512
"""MiB that the process of stages that are not built in allocates; with more, it is ended."""


class ComposedPolicies:
    """The policies of a policy file. Call `start` before the first ranking and `close` last.

    Args:
        timeout_s: longest time of one ranking in the process of stages that are not built in.
        memory_mb: how much memory that process can allocate after its start.
        on_death: called if the supervision of that process fails.
    """

    def __init__(
        self,
        file: PolicyFile = NO_POLICIES,
        timeout_s: float = MAX_RANKING_S,
        memory_mb: int = MAX_MEMORY_MB,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.file = file
        self._own = [composition for composition in file.compositions.values() if composition.built_in]
        self._pipelines: StagePipelines | None = None
        foreign = [composition for composition in file.compositions.values() if not composition.built_in]
        self.process = PolicyProcess(foreign, timeout_s, memory_mb, on_death) if foreign else None

    async def start(self) -> None:
        """Makes every stage; raises SluiceError (INVALID_ARGUMENT) for one that cannot be made."""
        try:
            self._pipelines = StagePipelines(self._own)
        except ValueError as error:
            raise invalid(f"{error}.", param="policies") from None
        if self.process is not None:
            await self.process.start()

    async def close(self) -> None:
        """Ends the process, if any."""
        if self.process is not None:
            await self.process.close()

    def find(self, name: str) -> Composition | None:
        """Returns the composition of a name; None for other policies."""
        return self.file.compositions.get(name)

    async def rank(self, composition: Composition, request: PolicyRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Returns the ranking of at least one candidate; raises PolicyFailed."""
        if not composition.built_in and self.process is not None:
            return await self.process.rank(composition.name, request, candidates)
        if self._pipelines is None:
            self._pipelines = StagePipelines(self._own)
        try:
            return self._pipelines.rank(composition.name, request, candidates)
        except StageFailed as error:
            raise PolicyFailed("raised", f"Policy {composition.name}: {error}") from error


class PolicyRegistry:
    """Holds the built-in policies, separate for each model and part of a request because some have state.

    Args:
        names: of the composed policies, for messages.
    """

    def __init__(self, random: Random, names: Sequence[str] = ()) -> None:
        self._random = random
        self._names = names
        self._sets: dict[tuple[str, str], dict[str, BuiltInPolicy]] = {}

    def get(self, name: str, model: str, part: str) -> BuiltInPolicy:
        """Returns a policy; raises SluiceError (INVALID_ARGUMENT) for an unknown name.

        Args:
            model: a served model, which bounds the number of instances.
        """
        found = self._sets.get((model, part))
        if found is None:
            found = self._sets[model, part] = all_policies(self._random)
        policy = found.get(name)
        if policy is None:
            known = ", ".join((*found, *self._names))
            raise invalid(f"Unknown policy {quoted(name)}; use one of {known}.", param="policy")
        return policy
