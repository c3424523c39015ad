"""Reads the declared steps, and the loops of the modules where rows of many streams meet, from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT

SIGNS = {
    "services.common.rpc.call_server",
    "services.common.rpc.session",
    "services.common.rpc.multiplexed_call",
    "services.gateway.backends.rpc.link",
    "services.router.state.store.redis_pipe",
}
"""Imports by which a module is found to be one where rows meet."""

MEETING_PLACES = {
    "services/common/rpc/session.py",
    "services/common/rpc/multiplexed_call.py",
    "services/gateway/backends/rpc/link.py",
    "services/gateway/http/write_scheduler.py",
    "services/gateway/http/keepalive.py",
    "services/gateway/apis/live_view/feed.py",
    "services/gateway/pipeline/postprocess_plugin.py",
    "services/gateway/streams/link_events.py",
    "services/gateway/streams/manager.py",
    "services/gateway/streams/postprocess_pool.py",
    "services/gateway/streams/running.py",
    "services/gateway/streams/token_forwarder.py",
    "services/postprocess/parsers/isolated/child.py",
    "services/postprocess/parsers/isolated/host.py",
    "services/postprocess/streams/output_batch.py",
    "services/postprocess/streams/session.py",
    "services/postprocess/wire.py",
    "services/router/rpc/workers.py",
    "services/router/registration/manager.py",
    "services/router/state/store/redis_pipe.py",
    "services/router/state/sync/synchronizer.py",
    "services/router/state/workers/registry.py",
    "services/worker/serving/wire.py",
}
"""Further modules where rows meet; a module that lists itself here needs no sign."""

LOOPS = (ast.For, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def declared_steps() -> dict[str, str]:
    """Returns the place, ``path:function``, of each declared step by name."""
    steps: dict[str, str] = {}
    for path in sorted((ROOT / "services").rglob("*.py")):
        if "shared_step(" not in (text := path.read_text()):
            continue
        for place, function in _functions(ast.parse(text)):
            for name in _declared(function):
                assert name not in steps, f"{name} is declared at {steps[name]} and in {path}:{place}"
                steps[name] = f"{path.relative_to(ROOT)}:{place}"
    return steps


def undeclared_loops() -> set[str]:
    """Returns the places, ``path:function``, of functions with loops in meeting places that declare no step."""
    places = set()
    for path in sorted((ROOT / "services").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        if name not in MEETING_PLACES and not any(sign in text for sign in SIGNS):
            continue
        for place, function in _functions(ast.parse(text)):
            if not list(_declared(function)) and any(isinstance(node, LOOPS) for node in _own(function)):
                places.add(f"{name}:{place}")
    return places


def _functions(
    tree: ast.AST, within: tuple[str, ...] = ()
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        names = within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*within, node.name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ".".join(names), node
        yield from _functions(node, names)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of functions in it, which are listed by themselves."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own(node)


def _declared(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "shared_step":
            yield ast.literal_eval(decorator.args[0])


def exists(place: str) -> bool:
    """Returns whether a place, ``path:function``, exists."""
    path, _, function = place.partition(":")
    file = Path(ROOT / path)
    return file.is_file() and any(name == function for name, _ in _functions(ast.parse(file.read_text())))
