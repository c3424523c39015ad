"""What engines' own code adds to preprocess as extensions: their tokenizers, and models' processors of images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.base.errors import ErrorKind, SluiceError
from services.common.child_rpc.child import ChildLimits
from services.common.packages.extensions import MEDIA, TOKENIZERS, UnusableExtension, load_extension
from services.common.types.media.spans import MediaSpan
from services.preprocess.contract.tokenizer import ChatRequest, ChatTokenizer, ImageRule, TokenizerProtocol
from services.preprocess.media.expansion import CountedItem
from services.preprocess.media.rules import ModelFiles

PROCESSOR = "image-processor"
"""The entry point of rules by a model's own processor: a class with the parameters of `processor_rule`."""

MAX_ENGINE_START_S = 120.0
"""Seconds that an engine's process takes to start with its tokenizer; then it is ended."""

_HANG_FACTOR = 2.0


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine's processes.

    Attributes:
        python: an interpreter that has the engine's package; empty for this one.
        processes: number of processes per model.
        limit_s: maximum run time of one request, seconds.
        template_s: maximum run time of a request with its own chat template, seconds.
        start_s: maximum load time of a process, seconds.
        memory_mb: memory a process may allocate after loading, MiB.
        foreign: whether the files came from a worker, so that memory is also limited while loading.
    """

    python: str = ""
    processes: int = 1
    limit_s: float = 10.0
    template_s: float = 2.0
    start_s: float = MAX_ENGINE_START_S
    memory_mb: int = 2048
    foreign: bool = False

    def arguments(self, folder: str) -> list[object]:
        """Returns what the command of a process ends with.

        Args:
            folder: for its temporary files.
        """
        limits = ChildLimits(self.limit_s, self.memory_mb, alarm_s=self.limit_s * _HANG_FACTOR)
        return [limits, folder, *(["foreign"] if self.foreign else [])]


class NoImages(Exception):
    """The model takes no images; the text says why, as a sentence."""


class MediaTokenizer(ChatTokenizer):
    """A tokenizer that makes the prompt of media items itself, from their files."""

    @abstractmethod
    def pack_media(
        self, chat: ChatRequest, items: Sequence[CountedItem], files: Sequence[bytes]
    ) -> tuple[bytes, tuple[MediaSpan, ...]]:
        """Returns packed ids of a chat with media items, and their spans.

        Args:
            items: the checked items that the messages refer to.
            files: the encoded file of each item.
        """


def engine_tokenizer(engine: str, path: Path, options: EngineOptions, chat_template: str) -> TokenizerProtocol:
    """Returns the tokenizer of an engine, whose entry point is a class with these parameters.

    Args:
        path: the model folder or tokenizer file.
        chat_template: replaces the model's own; empty to keep that one.

    Raises:
        SluiceError: FAILED_PRECONDITION without the extension; the tokenizer's own errors.
    """
    try:
        make = load_extension(
            TOKENIZERS,
            engine,
            f"The tokenizer of {engine} is an extension that is not installed: the folder services/preprocess/engines.",
        )
    except UnusableExtension as error:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, str(error), param="model", code="missing_extra") from error
    tokenizer: TokenizerProtocol = make(engine, path, options, chat_template)
    return tokenizer


def processor_rule(
    path: Path,
    render: Callable[[ChatRequest], str],
    token_id: Callable[[str], int | None],
    engines: Sequence[EngineOptions],
) -> ImageRule:
    """Returns a rule by a model's own processor of images.

    Args:
        path: the model's folder.
        render: renders a chat by the model's template.
        engines: how processes run; this interpreter is preferred to those of the engines.

    Raises:
        NoImages: without the extension or a processor, or if its ids depend on more than the size of an image.
    """
    try:
        make = load_extension(
            MEDIA, PROCESSOR, "The images of this model need the extension services/preprocess/engines."
        )
        rule: ImageRule = make(path, render, token_id, engines)
    except UnusableExtension as error:
        raise NoImages(str(error)) from error
    return rule


def has_processor(files: ModelFiles) -> bool:
    """Returns whether a model's files declare a processor of images."""
    return bool(files.preprocessor or files.processor) and (
        "image_processor_type" in files.preprocessor
        or "image_processor" in files.processor
        or "vision_config" in files.config
    )
