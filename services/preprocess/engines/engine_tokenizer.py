"""Tokenizers of engines behind the interface of all tokenizers; calls go to the processes of `engines.process`."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, invalid, unavailable
from services.common.child_rpc.process import engine_command
from services.common.packages.engines import TESTED_VERSIONS, is_tested
from services.common.packages.model_files import fingerprint, read_json
from services.common.types.media.spans import MediaKind, MediaSpan
from services.preprocess.contract.generation_defaults import eos_ids, generation_defaults
from services.preprocess.contract.tokenizer import ChatRequest, TokenizerFacts
from services.preprocess.engines.process import EngineProcess, deadly_prompt
from services.preprocess.engines.tokenizer import chat_argument
from services.preprocess.media.engine_media import read_prompt, with_blanks, with_files
from services.preprocess.media.expansion import CountedItem
from services.preprocess.templates.processes import MODEL_FAULT
from services.preprocess.tokenizers.engine_extensions import EngineOptions, MediaTokenizer

log = logging.getLogger(__name__)

_UNSET = 1 << 31  # larger values in files mean "unset"


class EngineTokenizer(MediaTokenizer):
    """A tokenizer implemented by an engine.

    Attributes:
        media_kinds: kinds of media items that `pack_media` takes.
        no_images: why it takes no images, as a sentence; may be empty.

    Args:
        engine: a module of `services.preprocess.engines`.
        path: the model folder or tokenizer file.
        chat_template: replaces the model's own; empty to keep that one.
    """

    blocks = True

    def __init__(self, engine: str, path: Path, options: EngineOptions, chat_template: str = "") -> None:
        self._options = options
        self._template = chat_template
        self._scratch = tempfile.TemporaryDirectory(prefix="sluice-engine-", ignore_cleanup_errors=True)
        self._command = engine_command(
            options.python, "services.preprocess.engines.host", engine, path, *options.arguments(self._scratch.name)
        )
        self._lock = Lock()
        self._foreign: EngineProcess | None = None
        self._closed = False
        deadly = _deadly_model if options.foreign else deadly_prompt
        self._processes = [self._process(options.limit_s, deadly) for _ in range(options.processes)]
        try:
            (reported, *_) = [process.facts() for process in self._processes]
        except BaseException:
            self.close()
            raise
        self.media_kinds = frozenset(kind for kind in MediaKind if kind.capability in reported["media"])
        self.no_images = str(reported["no_images"])
        self.facts = _facts(engine, path, {**reported, **_own_template(chat_template)})
        if not is_tested(engine, reported["version"]):
            log.warning(
                "the installed engine version differs from the tested one",
                extra={"engine": engine, "version": reported["version"], "tested": TESTED_VERSIONS[engine]},
            )

    def _process(self, limit_s: float, deadly: Callable[[], SluiceError]) -> EngineProcess:
        wait_s = 3 * limit_s + self._options.start_s
        return EngineProcess(self._command, limit_s, wait_s, self._options.start_s, deadly=deadly)

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [process.pid for process in self._processes]

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        ids: list[int] = self._process_for(chat).call("encode_chat", self._argument(chat))
        return ids

    def pack_media(
        self, chat: ChatRequest, items: Sequence[CountedItem], files: Sequence[bytes]
    ) -> tuple[bytes, tuple[MediaSpan, ...]]:
        """See MediaTokenizer; raises SluiceError as `encode_chat`, `with_files` and `read_prompt`."""
        argument = self._argument(replace(chat, messages=with_files(chat.messages, items, files)))
        return read_prompt(self._process_for(chat).call("encode_media", argument), items)

    def render(self, chat: ChatRequest) -> str:
        """Implements `TokenizerProtocol.render`; media items appear as their placeholders, whatever is in them."""
        chat = replace(chat, messages=with_blanks(chat.messages))
        text: str = self._process_for(chat).call("render", self._argument(chat))
        return text

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        ids: list[int] = self._call("encode_text", {"text": text, "add_special_tokens": add_special_tokens})
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        argument = {"token_ids": list(token_ids), "skip_special_tokens": skip_special_tokens}
        text: str = self._call("decode", argument)
        return text

    def _argument(self, chat: ChatRequest) -> dict[str, Any]:
        if self._template and not chat.chat_template:
            chat = replace(chat, chat_template=self._template)
        return chat_argument(chat)

    def _call(self, verb: str, argument: dict[str, Any]) -> Any:
        return self._least_loaded().call(verb, argument)

    def _least_loaded(self) -> EngineProcess:
        return min(self._processes, key=lambda process: (not process.up, process.outstanding))

    def _process_for(self, chat: ChatRequest) -> EngineProcess:
        """Returns the process for a chat; chats with a template share one, so hostile ones only delay each other."""
        if not chat.chat_template:
            return self._least_loaded()
        with self._lock:
            if self._closed:
                raise unavailable("The service is stopping.")
            if self._foreign is None or self._foreign.over:  # a failed start may succeed now
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
        "The tokenizer delivered by the workers of this model crashes on this prompt.",
        param="model",
        code=MODEL_FAULT,
    )


def _deadly_template() -> SluiceError:
    return invalid("The chat template requires too much time or memory.", param="chat_template")


def _own_template(given: str) -> dict[str, Any]:
    return {"chat_template": given, "has_chat_template": True} if given else {}


def _facts(engine: str, path: Path, reported: dict[str, Any]) -> TokenizerFacts:
    generation, model = read_json(path, "generation_config.json"), read_json(path, "config.json")
    listed = generation.get("eos_token_id", model.get("eos_token_id"))
    template: str = reported["chat_template"]
    size = model.get("vocab_size")
    return TokenizerFacts(
        processor=engine,
        fingerprint=fingerprint(path),
        vocab_size=max(reported["vocab_size"], size if isinstance(size, int) and size < _UNSET else 0),
        eos_ids=eos_ids(list(reported["eos_ids"]), listed),
        context_length=reported["context_length"] if reported["context_length"] < _UNSET else 0,
        has_chat_template=reported["has_chat_template"],
        template_fingerprint=hashlib.sha256(template.encode()).hexdigest() if template else "",
        defaults=generation_defaults(generation),
    )
