"""Suites that are deliberately wrong: a matrix that stays green with one of them proves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
GATEWAYS, ROUTERS, TEXTS = ("gateway", "gateway-1"), ("router", "router-1"), ("postprocess-0", "postprocess-1")
WORKERS = ("worker-0", "worker-1", "worker-2")


@dataclass(frozen=True, slots=True)
class Break:
    """What is wrong.

    Attributes:
        red: the part and the fault whose row it turns red.
        gateway_flags, router_flags, worker_flags: of every gateway, router or worker.
        redis_durable: whether Redis writes to its disk before it acknowledges.
        code_of: code that single processes run instead, by name, as LooseSuite has it.
    """

    name: str
    about: str
    red: tuple[str, str] = ("", "")
    gateway_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()
    redis_durable: bool = True
    code_of: Mapping[str, str] = field(default_factory=dict)


def _bug(name: str, about: str, red: tuple[str, str], processes: tuple[str, ...], *lines: str) -> Break:
    """Returns a bug that some processes have: lines of Python that run before the service does."""
    code = "\n".join(lines) + "\n" + _RUN
    return Break(name, about, red, code_of=dict.fromkeys(processes, code))


_BELIEVES = (
    "import services.router.state.sync.load_reconciler as reconciler",
    "async def believe(self, view): pass",
    "reconciler.LoadReconciler.correct = believe",
)
"""Lets routers not compare reservations with what workers report, which repairs any that are kept too long."""


NOTHING = Break("", "as it is")

BREAK_KINDS = (
    Break(
        "migration-off",
        "gateways that do not move generations to another worker",
        ("worker", "sigkill"),
        gateway_flags=("--no-migration",),
    ),
    replace(
        _bug(
            "leases-off",
            "routers that keep the reservations of owners that are gone for an hour, whatever workers report",
            ("gateway", "sigkill"),
            ROUTERS,
            *_BELIEVES,
        ),
        router_flags=("--owner-lease-ms", "3600000"),
    ),
    _bug(
        "worker-restarts",
        "workers that begin anew when they take over a generation",
        ("worker", "sigkill"),
        WORKERS,
        "import dataclasses, services.worker.engines.mock.text as text",
        "answer = text.TextGenerator.answer",
        "def wrong(self, request, limit): return answer(self, dataclasses.replace(request, resumed_tokens=0), limit)",
        "text.TextGenerator.answer = wrong",
    ),
    _bug(
        "preprocess-alone",
        "gateways that call the first replica of a service that serves, for ever, and no other",
        ("preprocess", "sigkill"),
        GATEWAYS,
        "import services.common.rpc.replicas as replicas",
        "pick, chosen = replicas.ReplicaSet.pick, {}",
        "def wrong(self, exclude=frozenset(), prefer=None):",
        "    first = next(iter(self._replicas.values()), None)",
        "    if self not in chosen and (first is None or not first.serving): return pick(self, exclude, prefer)",
        "    return chosen.setdefault(self, first)",
        "replicas.ReplicaSet.pick = wrong",
        "replicas._refused = lambda cause: False",
        "replicas.RetryBudget.spend = lambda self: False",
    ),
    _bug(
        "router-keeps",
        "routers that forget to free every fifth reservation, whatever workers report",
        ("router", "sigkill"),
        ROUTERS,
        *_BELIEVES,
        "import itertools, services.router.scheduling.lifecycle as lifecycle",
        "free, turns = lifecycle.RequestLifecycle.free, itertools.count(1)",
        "async def wrong(self, reservations, outcomes=()):",
        "    return await free(self, [one for one in reservations if next(turns) % 5], ())",
        "lifecycle.RequestLifecycle.free = wrong",
    ),
    _bug(
        "postprocess-repeats",
        "postprocess replicas that send a stream they take over from its beginning",
        ("postprocess", "sigkill"),
        TEXTS,
        "import services.postprocess.streams.resume as resume",
        "def wrong(self, text):",
        "    self._text = 0",
        "    return text",
        "resume.Remainder.text = wrong",
    ),
    _bug(
        "gateway-hangs",
        "gateways that never go on with a generation whose worker is lost",
        ("worker", "sigkill"),
        GATEWAYS,
        "import asyncio, services.gateway.streams.migration as migration",
        "async def wrong(self, stream, lost, cause): await asyncio.sleep(3600)",
        "migration.Migrator._move = wrong",
    ),
    _bug(
        "picker-keeps",
        "endpoint pickers that do not free every fifth request, whatever workers report",
        ("picker", "sigkill"),
        ROUTERS,
        *_BELIEVES,
        "import itertools, services.router.picker.releases as releases",
        "free, turns = releases.Releases.free, itertools.count(1)",
        "def wrong(self, *given): return free(self, *given) if next(turns) % 5 else None",
        "releases.Releases.free = wrong",
    ),
    _bug(
        "gateway-own-clock",
        "gateways that judge the leases of background responses by their own clocks alone",
        ("gateway", "clock-10min"),
        GATEWAYS,
        "import math, services.gateway.apis.responses.redis_store as redis_store",
        "async def wrong(self, owner, response_id): return math.inf",
        "redis_store.RedisStore.age_s = wrong",
    ),
    _bug(
        "router-rereads-nothing",
        "routers that never look at their certificates and tokens again",
        ("router", "token-rotated"),
        ROUTERS,
        "import services.common.security.file_watcher as files",
        "files.WatchedFiles._reload = lambda self: None",
    ),
    Break(
        "redis-forgets",
        "a Redis that acknowledges what it has not written to its disk",
        ("redis", "sigkill"),
        redis_durable=False,
    ),
)
BREAKS: Mapping[str, Break] = {found.name: found for found in BREAK_KINDS}
