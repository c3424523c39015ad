"""The policy of which service may call which RPC, applied when tokens or certificates identify callers."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.security.identity import OPERATOR


@dataclass(frozen=True)
class _Rpcs:
    """A set of RPCs: `names`, or with `others` all except these."""

    names: frozenset[str]
    others: bool = False

    def __contains__(self, name: str) -> bool:
        return (name in self.names) != self.others


def _only(*names: str) -> _Rpcs:
    return _Rpcs(frozenset(names))


def _all_but(*names: str) -> _Rpcs:
    return _Rpcs(frozenset(names), others=True)


_DISCOVERY = _only("ListWorkers", "WatchWorkers")
_TOKENIZERS = _only("GetInfo", "GetTokenizer")

_MAY = {
    "Router": {
        "gateway": _all_but("Attach", "DumpIndex"),
        "scheduler": _all_but("Attach", "DumpIndex"),
        "worker": _only("Attach"),
        "preprocess": _DISCOVERY,
        "postprocess": _DISCOVERY,
    },
    "Worker": {
        "gateway": _all_but("Control"),
        "scheduler": _all_but("Control"),
        "preprocess": _TOKENIZERS,
        "postprocess": _TOKENIZERS,
    },
    "Preprocess": {"gateway": _all_but(), "scheduler": _all_but(), "router": _only("Tokenize", "Session")},
    "Postprocess": {"gateway": _all_but(), "scheduler": _all_but()},
    "ExternalProcessor": {"scheduler": _all_but()},
}
_PACKAGES = ("sluice.v1", "envoy.service.ext_proc.v3")


def may_call(caller: str, method: str) -> bool:
    """Whether `caller` may call `method`, a path such as ``/sluice.v1.Worker/Session``.

    Operators may call everything. Every caller may call services that are not Sluice's, such as health.
    """
    service, _, rpc = method.lstrip("/").partition("/")
    package, _, name = service.rpartition(".")
    if caller == OPERATOR or package not in _PACKAGES or name not in _MAY:
        return True
    return rpc in _MAY[name].get(caller, _only())
