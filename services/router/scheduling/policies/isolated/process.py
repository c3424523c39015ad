"""Starts, calls and supervises the process of the stages that are not built in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.common.child_rpc.call_queue import Call, CallQueue
from services.common.child_rpc.process import Child, bare_environment, module_command
from services.common.errors import ErrorKind, SluiceError, first_line, invalid, unavailable
from services.common.tasks import TaskOwner
from services.router.scheduling.policies.composition import Composition, Ranking
from services.router.scheduling.policies.contract import Candidate, PolicyRequest
from services.router.scheduling.policies.isolated.wire import pack_call, pack_compositions, unpack_reply

log = logging.getLogger(__name__)

MODULE = "services.router.scheduling.policies.isolated.child"
WINDOW = 16
MAX_WAITING = 256
"""Requests that wait for the process of the policies; for further ones the policy fails with `busy`."""
MAX_FRAME_BYTES = 16 << 20
"""Bytes of a message of the process of the policies; a process that sends a longer one is replaced."""
START_S = 60.0
BACKOFF_S = (0.1, 5.0)
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


class PolicyProcess(CallQueue[bytes]):
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
        super().__init__(limit_s, WINDOW)
        self._hello = pack_compositions(compositions)
        self._command = module_command(MODULE, memory_mb, 10 * limit_s + 1)
        self._tasks = TaskOwner(on_death)
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Id of the running process; 0 for none."""
        return self.child.pid if self.child is not None else 0

    async def start(self) -> None:
        """Starts the process; raises SluiceError if a stage cannot be made."""
        self.use(await self._launch())
        self._tasks.spawn(self._supervise(), "policies")

    async def close(self) -> None:
        """Ends the process; calls under way fail."""
        await self._tasks.close()
        child = self.child
        self.drop()
        self._fail_waiting("down", "The router is stopping.")
        if child is not None:
            await child.end()

    async def rank(self, policy: str, request: PolicyRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Returns the ranking of candidates; raises PolicyFailed."""
        if self.child is None:
            raise PolicyFailed("down", f"Policy {policy} has no process at the moment.")
        if self.outstanding >= MAX_WAITING:
            raise PolicyFailed("busy", f"{self.outstanding} requests already wait for policy {policy}.")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting.append(Call(pack_call(policy, request, candidates), future))
        self.send_ready()
        try:
            reply = await asyncio.wait_for(future, self._limit_s)
            ranking = unpack_reply(reply, len(candidates))
        except TimeoutError:
            raise PolicyFailed("slow", f"Policy {policy} took longer than {self._limit_s:g} s.") from None
        except (ValueError, RecursionError):
            raise PolicyFailed("raised", f"Policy {policy} returned something other than a ranking.") from None
        if isinstance(ranking, str):
            raise PolicyFailed("raised", f"Policy {policy}: {first_line(ranking, MAX_REASON)}")
        return ranking

    def on_reply(self, call: Call[bytes], reply: bytes) -> None:
        call.resolve(reply)

    def on_failure(self, timed_out: bool) -> None:
        call = self.take_head()
        if call is not None:
            why, what = ("slow", "took too long") if timed_out else ("died", "ended its process")
            call.resolve(PolicyFailed(why, f"A stage of the policy {what}."))
        self.drop()
        self._ended.set()

    def on_no_child(self) -> None:
        self._fail_waiting("down", "The process of the policies is starting.")

    def _fail_waiting(self, why: str, message: str) -> None:
        while self.waiting:
            self.waiting.popleft().resolve(PolicyFailed(why, message))

    async def _supervise(self) -> None:
        backoff = BACKOFF_S[0]
        while True:
            await self._ended.wait()
            self._ended.clear()
            backoff = BACKOFF_S[0] if self.replies else min(backoff * 2, BACKOFF_S[1])
            log.warning("the process of the policies ended and is being restarted", extra={"after_s": backoff})
            await asyncio.sleep(backoff)
            try:
                self.use(await self._launch())
            except SluiceError as error:
                log.warning("the process of the policies does not start: %s", error.message)
                self.replies = 0
                self._ended.set()

    async def _launch(self) -> Child:
        """Returns a process that has made its stages; raises SluiceError."""
        try:
            child = await Child.launch(self._command, MAX_FRAME_BYTES, bare_environment())
        except OSError as error:
            raise unavailable(f"The process of the policies cannot be started: {error.strerror}.") from error
        try:
            child.send(self._hello)
            hello = await child.receive_json(START_S)
        except (EOFError, TimeoutError, ValueError) as error:
            await child.end()
            raise unavailable(
                f"The process of the policies did not start ({type(error).__name__}); see the log above."
            ) from None
        except BaseException:
            await child.end()
            raise
        if problem := hello.get("error"):
            await child.end()
            raise invalid(f"{problem}.", param="policies")
        return child
