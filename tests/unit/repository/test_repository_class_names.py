"""One class name has one meaning in the whole repository."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.repository import ROOT

SHARED = {
    "Adapter Adapters": "a LoRA adapter and the loaded ones, in each in-process engine",
    "Block": "a content block of a message; a block of an engine's cache",
    "Caller": "the sender of an RPC, and of a request to an operation",
    "ChatTools": "a chat's tools as each API declares them",
    "Child": "a child process, behind each of its transports",
    "Constraint": "a constraint on the output, before and after compilation",
    "Controls": "control actions, of a worker and of each engine",
    "Engine": "the packages of parsers behind one protocol",
    "EngineTokenizer": "a tokenizer implemented by an engine, and its protocol in the child process",
    "Facts": "properties of a started engine, or of a model's parsers, that a mapping needs",
    "Finish": "the end of a stream, in services that do not import each other",
    "Limits Load": "limits and loads of what each service bounds",
    "Manager": "SGLang's tokenizer manager, in worker and preprocess",
    "MemoryStore RedisStore": "the implementations of a service's store",
    "Operations": "the operations of the gateway by path, and the control actions of the mock engine",
    "Options": "the options of a command or of an engine",
    "Picker": "the stage of a routing policy that orders candidates, and the endpoint picker of a router",
    "StopParams": "what ends a generation, in gateway and worker",
    "Replica": "a replica of a service, as its callers see it, and the state of a router's own",
    "RequestState": "a request in flight, in each in-process engine",
    "Score": "the router's score of a worker, as gateway and router hold it",
    "Script": "a Lua script, and the router's with their common part",
    "Server": "a server process or listener of the package",
    "Sink": "receives a generation's output, in gateway and worker contract",
    "StreamOptions": "`stream_options` of each API, and the message of that name",
    "Tokenizer": "the class that each engine module of preprocess must define",
    "TokenizedPrompt": "a tokenized prompt, in gateway and worker",
    "Usage": "token counts: of the API's schema, of a response, of a generation",
    "Worker": "a worker as the router registers it, as the gateway compares it, and the worker itself",
}
EVERY_SERVICE = {"Settings", "Metrics", "Service"}


def test_class_names_in_services_and_sluice_are_unique_or_listed() -> None:
    places = defaultdict(list)
    for path in sorted(path for top in ("services", "sluice") for path in (ROOT / top).rglob("*.py")):
        if "v1" not in path.parts:
            classes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
            for node in classes:
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    shared = {name for name, found in places.items() if len(found) > 1 and not name.startswith("_")} - EVERY_SERVICE
    listed = {name for names in SHARED for name in names.split()}
    assert not {name: places[name] for name in sorted(shared - listed)}, "rename one, or list the name with its reason"
    assert not sorted(listed - shared), "remove what is no longer shared"
