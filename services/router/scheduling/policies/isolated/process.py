"""Starts and calls the process of the stages that are not built in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.common.base.errors import ErrorKind, SluiceError, first_line, invalid, unavailable
from services.common.base.tasks import TaskOwner
from services.common.child_rpc.child import ChildLimits
from services.common.child_rpc.lane import Call, Lane
from services.common.child_rpc.process import Child, bare_environment, module_command
from services.router.scheduling.policies.composition import Composition, Ranking
from services.router.scheduling.policies.contract import Candidate, PolicyRequest
from services.router.scheduling.policies.isolated.wire import pack_call, pack_compositions, unpack_reply

MODULE = "services.router.scheduling.policies.isolated.child"
WINDOW = 16
MAX_WAITING = 256
"""Requests that wait for the process of the policies; for further ones the policy fails with `busy`."""
MAX_FRAME_BYTES = 16 << 20
"""Bytes of a message of the process of the policies; a process that sends a longer one is replaced."""
START_S = 60.0
MAX_REASON = 300
"""Characters of a policy's own message in an error; the rest is left out."""


class PolicyFailed(SluiceError):
    """A composed policy gave no ranking; its `on_failure` says what happens to the query.

    Attributes:
        why: "raised" (or broke its contract), "slow", "died", "busy" or "down"; the value of the metric's label.
    """

    def __init__(self, why: str, message: str) -> None:
        super().__init__(ErrorKind.INTERNAL, message, code="policy_failed")
        self.why = why


class PolicyProcess(Lane[bytes]):
    """The process of all policies with stages that are not built in.

    Args:
        limit_s: longest time of one ranking; beyond it the process is killed and started again.
        memory_mb: how much memory the process can allocate after its start.
        on_death: called if the supervision fails.
    """

    def __init__(
        self,
        compositions: Sequence[Composition],
        limit_s: float,
        memory_mb: int,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        super().__init__(TaskOwner(on_death), limit_s, WINDOW)
        self._hello = pack_compositions(compositions)
        self._command = module_command(MODULE, ChildLimits(limit_s, memory_mb, alarm_s=10 * limit_s + 1))

    @property
    def pid(self) -> int:
        """Id of the running process; 0 for none."""
        return self.child.pid if self.child is not None else 0

    async def close(self) -> None:
        """Ends the process; calls under way fail."""
        child = self.child
        self.stop()
        await self.tasks.close()
        if child is not None:
            await child.end()

    async def rank(self, policy: str, request: PolicyRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Returns the ranking of candidates; raises PolicyFailed."""
        if self.child is None:
            raise PolicyFailed("down", f"Policy {policy} has no process at the moment.")
        if self.outstanding >= MAX_WAITING:
            raise PolicyFailed("busy", f"{self.outstanding} requests already wait for policy {policy}.")
        future, _ = self.submit(pack_call(policy, request, candidates))
        try:
            async with asyncio.timeout(self._call_s):
                reply = await future
            ranking = unpack_reply(reply, len(candidates))
        except TimeoutError:
            raise PolicyFailed("slow", f"Policy {policy} took longer than {self._call_s:g} s.") from None
        except (ValueError, RecursionError):
            raise PolicyFailed("raised", f"Policy {policy} returned something other than a ranking.") from None
        if isinstance(ranking, str):
            raise PolicyFailed("raised", f"Policy {policy}: {first_line(ranking, MAX_REASON)}")
        return ranking

    def drop(self) -> None:
        """Ends the process; the calls do not wait for the next one."""
        super().drop()
        self.fail_all(lambda: PolicyFailed("down", "The process of the policies is starting or stopping."))

    def read(self, reply: bytes) -> bytes:
        return reply

    def failed(self, timed_out: bool) -> SluiceError:
        why, what = ("slow", "took too long") if timed_out else ("died", "ended its process")
        return PolicyFailed(why, f"A stage of the policy {what}.")

    def repeats(self, call: Call[bytes]) -> bool:
        """Whether a call is repeated: never, its ranking would come too late."""
        return False

    async def open(self) -> Child:
        """Returns a process that has made its stages; raises SluiceError."""
        try:
            child, hello = await Child.start(
                self._command, MAX_FRAME_BYTES, START_S, bare_environment(), first=self._hello
            )
        except (EOFError, TimeoutError, ValueError) as error:
            raise unavailable(
                f"The process of the policies did not start ({type(error).__name__}); see the log above."
            ) from None
        except OSError as error:
            raise unavailable(f"The process of the policies cannot be started: {error.strerror}.") from error
        if problem := hello.get("error"):
            await child.end()
            raise invalid(f"{problem}.", param="policies")
        return child
