"""The process that runs a model's own processor of images, by transformers: the ids of one image by its size.

Its first frame names the texts that may stand for an image, or an error. A request is [verb, argument] as JSON; a reply
[result, error]. Code from the model's folder is never run.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, first_line
from services.preprocess.engines.host import Answer, host

MAX_REASON_CHARS = 200
"""Characters of a processor's own message in an error; the rest is left out."""
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_FORMATS: tuple[str | None, ...] = ("np", "pt", None)
_PROBE = ("a{0}b\n\n{0}\n\n c {0} \n{0}\n{0}{0}d", ((600, 400), (64, 64), (400, 600), (100, 30), (64, 64), (600, 400)))
"""A text with placeholders in various surroundings, and the sizes of its images."""


def main(arguments: list[str]) -> None:
    """Runs the process.

    Args:
        arguments: the model's folder; as `host` has them.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    path, *rest = arguments

    def load(limit: Callable[[], None]) -> tuple[dict[str, Any], Answer]:
        processor = ModelProcessor.load(Path(path), limit)
        return {"placeholders": processor.placeholders}, processor.call

    host(rest, load, _load_error)


def _load_error(error: Exception) -> SluiceError:
    reason = first_line(error, MAX_REASON_CHARS).rstrip(".") or type(error).__name__
    return SluiceError(ErrorKind.FAILED_PRECONDITION, reason)


class ModelProcessor:
    """A processor and its tokenizer.

    Args:
        processor: as loaded by transformers.

    Attributes:
        placeholders: texts that may stand for an image, the likeliest first.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        named = {name: value for name, value in vars(self._processor).items() if name.endswith("token")}
        found = sorted(named, key=lambda name: name != "image_token")
        self.placeholders = [named[name] for name in found if isinstance(named[name], str) and named[name]]
        self._formats = _FORMATS

    @classmethod
    def load(cls, path: Path, limit: Callable[[], None]) -> ModelProcessor:
        """Returns that of a model's folder.

        Args:
            limit: called once the library's code is loaded.
        """
        import transformers

        limit()
        try:
            return cls(transformers.AutoProcessor.from_pretrained(str(path), **_LOCAL))
        except ImportError:
            return cls(_without_video(transformers, path))

    def call(self, verb: str, argument: dict[str, Any]) -> Any:
        """Returns the result of a call."""
        return self.problem(**argument) if verb == "problem" else self.answer(**argument)

    def answer(self, placeholder: str, width: int, height: int) -> dict[str, Any]:
        """Returns {"ids": …} of an image, or {"refused": reason} for a size that the processor refuses."""
        try:
            return {"ids": self.ids(placeholder, width, height)}
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            return {"refused": first_line(error, MAX_REASON_CHARS).rstrip(".") or type(error).__name__}

    def ids(self, placeholder: str, width: int, height: int) -> list[int]:
        """Returns the ids that the processor makes in place of a placeholder."""
        text = f"a{placeholder}b"
        plain = self._plain(text)
        token_id = self._tokenizer.convert_tokens_to_ids(placeholder)
        if plain.count(token_id) != 1:
            raise ValueError("the placeholder is not one token")
        at = plain.index(token_id)
        before, after = plain[:at], plain[at + 1 :]
        made = self._processed(text, [(width, height)])
        end = len(made) - len(after)
        if made[:at] != before or made[end:] != after or end <= at:
            raise ValueError("its tokens depend on the text around it")
        return made[at:end]

    def problem(self, placeholder: str) -> str:
        """Returns why the ids of an image do not only depend on its size; empty if they do."""
        template, sizes = _PROBE
        text = template.format(placeholder)
        token_id = self._tokenizer.convert_tokens_to_ids(placeholder)
        plain, images = self._plain(text), iter(sizes)
        if plain.count(token_id) != len(sizes):
            return "its placeholder is not one token"
        expected: list[int] = []
        for token in plain:
            expected += self.ids(placeholder, *next(images)) if token == token_id else [token]
        if self._processed(text, list(sizes)) != expected:
            return "the tokens of an image depend on the text around it, or on other images"
        return ""

    def _plain(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def _processed(self, text: str, sizes: list[tuple[int, int]]) -> list[int]:
        from PIL import Image

        images = [Image.new("RGB", size) for size in sizes]
        for name in self._formats:
            try:
                made = self._processor(text=[text], images=images, return_tensors=name)
            except (ValueError, ImportError, AttributeError):
                if name is self._formats[-1]:
                    raise
                continue
            self._formats = (name,)
            (ids,) = made["input_ids"]
            return [int(token) for token in ids]
        raise AssertionError("the last format returns or raises")


def _without_video(transformers: Any, path: Path) -> Any:
    """Returns a processor without its part for videos, which needs more packages than that for images."""
    arguments: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            arguments |= json.loads((path / name).read_text("utf-8"))
    base: Any = getattr(transformers, str(arguments.get("processor_class")))

    class WithoutVideo(base):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    taken = set(inspect.signature(base.__init__).parameters) - {"image_processor", "tokenizer", "video_processor"}
    return WithoutVideo(
        **{name: value for name, value in arguments.items() if name in taken},
        image_processor=transformers.AutoImageProcessor.from_pretrained(str(path), **_LOCAL),
        tokenizer=transformers.AutoTokenizer.from_pretrained(str(path), **_LOCAL),
        video_processor=None,
    )
