"""Every fault by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.faults import injections_clock as clock
from tests.support.faults import injections_network as network
from tests.support.faults import injections_processes as processes
from tests.support.faults import injections_redis as redis
from tests.support.faults import injections_secrets as secrets
from tests.support.faults.fault import OTHER_TREE, Fault
from tests.support.faults.parts import PARTS, POOL, SECURED

NAMESPACE, CLOCK = "namespaces", "clock"
SINGLE, MOVING = "redis", ("redis-sentinel", "redis-cluster")
ALONE = tuple(part for part in PARTS if part not in MOVING)
"""Parts whose victim is one process that stays the same one."""
SERVICES = tuple(part for part in ALONE if part not in (SINGLE, "dns"))
GUARDED = tuple(part for part in SERVICES if PARTS[part].topology == POOL)
"""Services of the suite that is secured."""
CONNECTED = tuple(part for part in ALONE if part != "dns")
"""Parts with connections: names are asked for without one."""

FAULT_KINDS = (
    Fault("sigkill", "SIGKILL; started again after 2 s", processes.killed),
    Fault("sigterm", "SIGTERM; started again 2 s after its end", processes.terminated, parts=ALONE),
    Fault("sigstop-5s", "SIGSTOP for 5 s", processes.stopped(5)),
    Fault("sigstop-60s", "SIGSTOP for 60 s", processes.stopped(60)),
    Fault(
        "oom",
        "ended by the kernel, because its control group has no memory left; started again after 2 s",
        processes.out_of_memory,
        needs=("cgroup",),
        parts=ALONE,
    ),
    Fault("reset", "every connection reset", network.reset, needs=(NAMESPACE, "sockets"), parts=CONNECTED),
    Fault(
        "one-way-partition",
        "nothing reaches it for 20 s; what it sends arrives",
        network.half_partitioned,
        needs=(NAMESPACE, "filter"),
        parts=ALONE,
    ),
    Fault("partition", "nothing reaches or leaves it for 20 s", network.partitioned, needs=(NAMESPACE,), parts=ALONE),
    Fault(
        "delay-200ms",
        "what it sends arrives 200 ms later, for 10 s",
        network.delayed,
        needs=(NAMESPACE, "tap"),
        parts=ALONE,
    ),
    Fault(
        "loss-5",
        "5 % of packets lost in each direction, for 10 s",
        network.lossy,
        needs=(NAMESPACE, "filter"),
        parts=ALONE,
    ),
    Fault("ten-times-slower", "runs a tenth of the time, in slices of 10 ms, for 8 s", processes.slowed, parts=ALONE),
    Fault("disk-full", "no room for its log for 5 s", redis.disk_full, needs=("mount",), parts=(SINGLE,)),
    Fault("flushall", "FLUSHALL", redis.emptied, parts=(SINGLE, *MOVING)),
    Fault("failover", "its replica takes over, as planned", redis.moved, parts=MOVING),
    Fault(
        "clock-10min",
        "its clock ten minutes ahead for 9 s, then ten minutes behind for 9 s",
        clock.wrong,
        needs=(CLOCK,),
        parts=(*CONNECTED, *MOVING),
    ),
    Fault(
        "certificate-expired",
        "its certificate expires, its connections are reset 5 s later, and it is renewed 10 s after that",
        secrets.certificate_expired,
        needs=(NAMESPACE, "sockets"),
        parts=GUARDED,
        topology=SECURED,
    ),
    Fault(
        "token-rotated",
        "all tokens are rotated in the documented steps; its part gets its files last",
        secrets.tokens_rotated,
        parts=GUARDED,
        topology=SECURED,
    ),
    Fault(
        "rolling-restart", "SIGTERM to every replica, one after the other", processes.restarted_in_turn, parts=SERVICES
    ),
    Fault(
        "rolling-upgrade",
        "every replica restarted with another version, and then with this one, one after the other",
        processes.upgraded_in_turn,
        needs=(OTHER_TREE,),
        parts=SERVICES,
    ),
)
FAULTS: Mapping[str, Fault] = {fault.name: fault for fault in FAULT_KINDS}
