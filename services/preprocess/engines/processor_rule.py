"""Which tokens stand for an image of a model without a built-in rule: those that the model's own processor makes."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from services.common.base.errors import SluiceError, invalid
from services.common.child_rpc.process import engine_command
from services.preprocess.contract.tokenizer import ChatRequest, ImageRule, Message
from services.preprocess.engines.process import EngineProcess
from services.preprocess.media.rules import MAX_TOKENS
from services.preprocess.tokenizers.engine_extensions import EngineOptions, NoImages

log = logging.getLogger(__name__)

MAX_KNOWN_TOKENS = 1 << 21
"""Token ids of media items that are remembered by size; the oldest are forgotten."""
_TEXT: Message = {"type": "text", "text": "Describe: "}
_TEXT_CHAT = ChatRequest([{"role": "user", "content": [_TEXT]}])
_IMAGE_CHAT = ChatRequest([{"role": "user", "content": [_TEXT, {"type": "image", "media": 0}]}])
INSTALL = (
    "The images of this model need its own processor: install transformers beside preprocess, or name an interpreter "
    "that has it with --vllm-python or --sglang-python."
)


class ProcessorRule(ImageRule):
    """A rule whose answers come from a process, and are kept by the size of the image.

    Args:
        path: the model's folder.
        render: renders a chat by the model's template.
        engines: how processes run; this interpreter is preferred to those of the engines.

    Raises:
        NoImages: without a processor, or if its ids depend on more than the size of an image.
    """

    blocks = True

    def __init__(
        self,
        path: Path,
        render: Callable[[ChatRequest], str],
        token_id: Callable[[str], int | None],
        engines: Sequence[EngineOptions],
    ) -> None:
        options, python = engines[0], _python(engines)
        self._lock = Lock()
        self._known: OrderedDict[tuple[int, int], array[int] | str] = OrderedDict()
        self._tokens = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="sluice-processor-", ignore_cleanup_errors=True)
        module = "services.preprocess.engines.image_processor"
        command = engine_command(python, module, path, *options.arguments(self._scratch.name))
        wait_s = 3 * options.limit_s + options.start_s
        self._process = EngineProcess(command, options.limit_s, wait_s, options.start_s, deadly=_deadly_image)
        try:
            self._placeholder = self._find_placeholder(render)
            found = token_id(self._placeholder)
            if found is None:
                raise NoImages("The placeholder of the model's processor is not a token of its tokenizer.")
        except SluiceError as error:
            self.close()
            raise NoImages(f"The model's own processor cannot be used: {error.message.rstrip('.')}.") from error
        except BaseException:
            self.close()
            raise
        self.token_id = found

    def _find_placeholder(self, render: Callable[[ChatRequest], str]) -> str:
        """Returns the text that the template writes in place of an image and that the processor expands."""
        named: list[str] = self._process.facts()["placeholders"]
        with_image, without = render(_IMAGE_CHAT), render(_TEXT_CHAT)
        written = [text for text in named if with_image.count(text) - without.count(text) == 1]
        problems: list[str] = []
        for text in written:
            problem = self._process.call("problem", {"placeholder": text})
            if not problem:
                return text
            problems.append(problem)
        reason = problems[0] if problems else "the chat template writes no placeholder of it"
        raise NoImages(f"The model's own processor cannot be used: {reason}.")

    def ids(self, width: int, height: int) -> array[int]:
        size = (width, height)
        with self._lock:
            known = self._known.get(size)
            if known is not None:
                self._known.move_to_end(size)
        if known is None:
            argument = {"placeholder": self._placeholder, "width": width, "height": height}
            known = _read(self._process.call("ids", argument))
            self._keep(size, known)
        if isinstance(known, str):
            raise ValueError(known)
        return known

    def _keep(self, size: tuple[int, int], answer: array[int] | str) -> None:
        with self._lock:
            if size in self._known:
                return
            self._known[size] = answer
            self._tokens += len(answer)
            while self._tokens > MAX_KNOWN_TOKENS:
                self._tokens -= len(self._known.popitem(last=False)[1])

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
        self._scratch.cleanup()


def _python(engines: Sequence[EngineOptions]) -> str:
    """Returns the interpreter to use, empty for this one; raises NoImages without any."""
    if importlib.util.find_spec("transformers") is not None:
        return ""
    python = next((options.python for options in engines if options.python), None)
    if python is None:
        raise NoImages(INSTALL)
    return python


def _read(reply: Mapping[str, Any]) -> array[int] | str:
    """Returns the ids of a reply, or why the image is refused."""
    if "refused" in reply:
        return f"is refused by the model's processor: {reply['refused']}"
    ids = array("I", reply["ids"])
    return ids if len(ids) <= MAX_TOKENS else f"has more than {MAX_TOKENS} tokens"


def _deadly_image() -> SluiceError:
    return invalid("An image of this size crashes the model's processor; scale it down.", param="messages")
