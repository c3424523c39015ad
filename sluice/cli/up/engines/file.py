"""The file of `sluice up --engines`: a list of running vLLM and SGLang servers, or where Kubernetes lists them.

- name: first                          # worker id, unique
  url: http://10.0.0.1:8000            # of the server; grpc://host:port of a `vllm serve --grpc`
  kv_events: tcp://10.0.0.1:5557       # optional; by default as the server reports it; "off": none
  kv_replay: tcp://10.0.0.1:5558       # optional, with kv_events
  api_key_file: keys/first             # optional; relative to this file
  model: chat=/models/chat             # optional NAME=SOURCE; by default the server's own
  block_size: 32                       # optional; by default the server's own
  api: openai                          # optional: a server of another kind; excludes block_size and KV events

Instead of the list, `kubernetes:` with the fields of `kubernetes.SliceQuery`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from services.common.base.errors import quoted
from services.worker.engines.http.options import NO_EVENTS
from sluice.cli.up.engines.entries import (
    GRPC,
    MAX_ENGINES,
    OPENAI,
    PROBLEMS,
    WITHOUT_GRPC,
    EngineEntry,
    EngineRegistry,
)
from sluice.cli.up.engines.kubernetes import EndpointSlices
from sluice.cli.up.engines.nodes import Node, YamlFile
from sluice.cli.up.engines.slice_query import SLICE_NUMBERS, SLICE_PROBLEMS, SliceQuery

KUBERNETES = "kubernetes"


class EngineFile:
    """Reads the servers from a file, or from the Kubernetes API that the file describes.

    Args:
        path: YAML, or JSON, which is a subset of it.
        slices: opens the list of a query.
    """

    def __init__(self, path: Path, slices: Callable[[SliceQuery], EngineRegistry] = EndpointSlices) -> None:
        self._path, self._file = path, YamlFile(path)
        self._open_slices = slices
        self._query: SliceQuery | None = None
        self._slices: EngineRegistry | None = None

    def entries(self) -> Sequence[EngineEntry]:
        """Returns the servers in the order of the list; raises BadRegistry at the first mistake."""
        root = self._file.root()
        if root is None:
            return ()
        if root.id == "mapping" and [key.value for key, _ in root.value] == [KUBERNETES]:
            return self._of_kubernetes(root.value[0][1])
        if root.id != "sequence":
            raise self._file.mistake(root, "the file", f"must be a list of engines, or a mapping with {KUBERNETES}")
        return tuple(self._listed(root))

    def _of_kubernetes(self, node: Node) -> Sequence[EngineEntry]:
        if node.id != "mapping":
            raise self._file.mistake(node, KUBERNETES, "must be a mapping with service or selector")
        query = SliceQuery(**self._file.fields(node, SLICE_PROBLEMS, SLICE_NUMBERS, ()))
        if bool(query.service) == bool(query.selector):
            raise self._file.mistake(node, KUBERNETES, "needs either service or selector")
        if query.api == OPENAI and (query.kv_events_port or query.block_size):
            raise self._file.mistake(node, "api", f"{OPENAI} excludes kv_events_port and block_size")
        if query.scheme == "grpc":
            for name in ("kv_events_port", "kv_replay_port", "api_key_file", "api"):
                if getattr(query, name):
                    raise self._file.mistake(node, name, "has no meaning with scheme: grpc")
        if query.kv_replay_port and not query.kv_events_port:
            raise self._file.mistake(node, "kv_replay_port", "needs kv_events_port")
        if self._slices is None or query != self._query:
            self._query, self._slices = query, self._open_slices(query)
        return self._slices.entries()

    def _listed(self, root: Node) -> Iterator[EngineEntry]:
        if len(root.value) > MAX_ENGINES:
            raise self._file.mistake(root, "the file", f"lists more than {MAX_ENGINES} engines")
        names: dict[str, int] = {}
        urls: dict[str, int] = {}
        for node in root.value:
            entry = self._entry(node)
            for field_name, value, seen in (("name", entry.name, names), ("url", entry.url.rstrip("/"), urls)):
                if value in seen:
                    raise self._file.mistake(node, field_name, f"{quoted(value)} is already used in line {seen[value]}")
                seen[value] = entry.line
            yield entry

    def _entry(self, node: Node) -> EngineEntry:
        if node.id != "mapping":
            raise self._file.mistake(node, "the entry", "must be a mapping with name and url")
        values = self._file.fields(node, PROBLEMS, ("block_size",), ("name", "url"))
        if values.get("kv_replay") and values.get("kv_events", NO_EVENTS) == NO_EVENTS:
            raise self._file.mistake(node, "kv_replay", "needs kv_events")
        if values.get("api") == OPENAI:
            for name in ("kv_events", "kv_replay", "block_size"):
                if name in values:
                    raise self._file.mistake(node, name, f"has no meaning with api: {OPENAI}")
        if values["url"].startswith(GRPC):
            for name in WITHOUT_GRPC:
                if name in values:
                    raise self._file.mistake(node, name, f"has no meaning with a {GRPC} url")
        return EngineEntry(**values, line=node.start_mark.line + 1)
