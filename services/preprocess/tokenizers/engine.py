"""Tokenizers of engines behind the boundary of all tokenizers: the calls go to processes, see `engine_process`."""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from services.common.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.models import fingerprint, read_json
from services.preprocess.engines import TESTED_VERSIONS
from services.preprocess.engines.process import EngineProcess, deadly_prompt
from services.preprocess.engines.tokenizer import chat_argument
from services.preprocess.generation_defaults import eos_ids, generation_defaults
from services.preprocess.protocol import ChatRequest, TokenizerFacts, TokenizerProtocol
from services.preprocess.templates.processes import MODEL_FAULT

log = logging.getLogger(__name__)

_SERVICES = Path(__file__).resolve().parents[2]
# Of this project the process sees only `services`; every package it needs is its own interpreter's.
_BOOTSTRAP = (
    "import sys, types; services = types.ModuleType('services'); services.__path__ = [sys.argv[1]]; "
    "sys.modules['services'] = services; from services.preprocess.engines.host import main; main(sys.argv[2:])"
)
_HANG_FACTOR = 2.0
_UNSET = 1 << 31  # what files give beyond this is no number of tokens


@dataclass(frozen=True)
class EngineOptions:
    """How the processes of one engine are run.

    Attributes:
        python: an interpreter that has the engine's package; empty for this one.
        processes: how many tokenize for one model at once.
        limit_s: longest that one request may compute, seconds.
        template_s: the same for a request that brings a chat template.
        start_s: longest that a process may take to load.
        memory_mb: MiB that a process may take beyond what it has once it is loaded.
        foreign: the files came from a worker, so that the limit of memory counts while they are loaded, too.
    """

    python: str = ""
    processes: int = 1
    limit_s: float = 10.0
    template_s: float = 2.0
    start_s: float = 120.0
    memory_mb: int = 2048
    foreign: bool = False


class EngineTokenizer(TokenizerProtocol):
    """An engine's own tokenizer.

    Args:
        engine: a module of `services.preprocess.engines`.
        path: the model's folder, or its tokenizer's file.
        chat_template: to use instead of the one that came with the model; empty for that one.
    """

    blocks = True

    def __init__(self, engine: str, path: Path, options: EngineOptions, chat_template: str = "") -> None:
        self._options = options
        self._template = chat_template
        self._scratch = tempfile.TemporaryDirectory(prefix="sluice-engine-", ignore_cleanup_errors=True)
        self._command = [
            *(options.python or sys.executable, "-P", "-c", _BOOTSTRAP, str(_SERVICES), engine, str(path)),
            *(str(options.limit_s * _HANG_FACTOR), str(options.memory_mb), self._scratch.name),
            *(["foreign"] if options.foreign else []),
        ]
        self._lock = Lock()
        self._foreign: EngineProcess | None = None
        self._closed = False
        deadly = _deadly_model if options.foreign else deadly_prompt
        self._processes = [self._process(options.limit_s, deadly) for _ in range(options.processes)]
        try:
            (found, *_) = [process.facts() for process in self._processes]
        except BaseException:
            self.close()
            raise
        self.facts = _facts(engine, path, {**found, **_own_template(chat_template)})
        if found["version"].partition("+")[0] != TESTED_VERSIONS[engine]:
            log.warning(
                "this version of the engine is not the one that is tested",
                extra={"engine": engine, "version": found["version"], "tested": TESTED_VERSIONS[engine]},
            )

    def _process(self, limit_s: float, deadly: Callable[[], SluiceError]) -> EngineProcess:
        wait_s = 3 * limit_s + self._options.start_s
        return EngineProcess(self._command, limit_s, wait_s, self._options.start_s, deadly=deadly)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [process.pid for process in self._processes]

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        """See TokenizerProtocol."""
        ids: list[int] = self._of(chat).call("encode_chat", self._argument(chat))
        return ids

    def render(self, chat: ChatRequest) -> str:
        """See TokenizerProtocol."""
        text: str = self._of(chat).call("render", self._argument(chat))
        return text

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """See TokenizerProtocol."""
        ids: list[int] = self._call("encode_text", {"text": text, "add_special_tokens": add_special_tokens})
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See TokenizerProtocol."""
        argument = {"token_ids": list(token_ids), "skip_special_tokens": skip_special_tokens}
        text: str = self._call("decode", argument)
        return text

    def _argument(self, chat: ChatRequest) -> dict[str, Any]:
        if self._template and not chat.chat_template:
            chat = replace(chat, chat_template=self._template)
        return chat_argument(chat)

    def _call(self, verb: str, argument: dict[str, Any]) -> Any:
        return self._idlest().call(verb, argument)

    def _idlest(self) -> EngineProcess:
        return min(self._processes, key=lambda process: (not process.up, process.outstanding))

    def _of(self, chat: ChatRequest) -> EngineProcess:
        """A chat that brings a template goes to a process of its own, where a hostile one holds up only its like."""
        if not chat.chat_template:
            return self._idlest()
        with self._lock:
            if self._closed:
                raise unavailable("The service is stopping.")
            if self._foreign is None or self._foreign.over:  # what kept the last one from starting may be over, too
                self._foreign = self._process(self._options.template_s, _deadly_template)
            return self._foreign

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            self._closed = True
            processes = [*self._processes, *([self._foreign] if self._foreign else [])]
        for process in processes:
            process.close()
        self._scratch.cleanup()


def _deadly_model() -> SluiceError:
    return SluiceError(
        ErrorKind.FAILED_PRECONDITION,
        "The tokenizer that the workers of this model delivered ends its process whenever it gets this prompt.",
        param="model",
        code=MODEL_FAULT,
    )


def _deadly_template() -> SluiceError:
    return invalid("The chat template needs too much time or memory.", param="chat_template")


def _own_template(given: str) -> dict[str, Any]:
    return {"chat_template": given, "has_chat_template": True} if given else {}


def _facts(engine: str, path: Path, found: dict[str, Any]) -> TokenizerFacts:
    generation, model = read_json(path, "generation_config.json"), read_json(path, "config.json")
    listed = generation.get("eos_token_id", model.get("eos_token_id"))
    template: str = found["chat_template"]
    size = model.get("vocab_size")
    return TokenizerFacts(
        processor=engine,
        fingerprint=fingerprint(path),
        vocab_size=max(found["vocab_size"], size if isinstance(size, int) and size < _UNSET else 0),
        eos_ids=eos_ids(list(found["eos_ids"]), listed),
        context_length=found["context_length"] if found["context_length"] < _UNSET else 0,
        has_chat_template=found["has_chat_template"],
        template_fingerprint=hashlib.sha256(template.encode()).hexdigest() if template else "",
        defaults=generation_defaults(generation),
    )
