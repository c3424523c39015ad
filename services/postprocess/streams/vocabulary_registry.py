"""Registry of the served vocabularies, each loaded once, off the event loop, at start or on first use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from weakref import WeakValueDictionary

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, not_found, quoted
from services.common.packages.model_files import PROCESSORS, ModelSpec, detect_processor, resolve
from services.postprocess.detokenize import hf, mistral
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.detect import names_of, native_names, template_of, writes_tools
from services.postprocess.parsers.engine_names import engine_of
from services.postprocess.parsers.registry import NONE

log = logging.getLogger(__name__)

MAX_LOAD_S = 300.0
"""Seconds that a vocabulary takes to load, a first download of its files included; then its load has failed."""
NO_OVERRIDES: Mapping[str, ParserNames] = {}


def load(spec: ModelSpec) -> Vocabulary:
    """Loads a vocabulary; takes seconds, so call it off the event loop.

    Raises:
        SluiceError: the source does not exist, or contains no valid tokenizer.
    """
    path = resolve(spec.source)
    # A custom processor only produces ids; their texts are in the files nevertheless.
    processor = spec.processor if spec.processor in PROCESSORS else detect_processor(path)
    try:
        vocabulary = mistral.load(path) if processor == "mistral" else hf.load(path)
        vocabulary.parsers = names_of(path, vocabulary.special_tokens)
        vocabulary.source, vocabulary.template = str(path.absolute()), template_of(path)
        return vocabulary
    except SluiceError:
        raise
    except ImportError as error:
        raise internal(f"The tokenizer of {spec.name} requires the package {error.name}; install it.") from error
    except Exception as error:  # both libraries raise unrelated types for invalid files
        raise invalid(
            f"The tokenizer of {spec.name} cannot be read ({type(error).__name__}: {error}); check its files.",
            param="model",
        ) from error


def chosen(given: ParserNames, vocabulary: Vocabulary, native: Sequence[str]) -> ParserNames:
    """Returns the parsers that `auto` selects.

    These are the operator's choice, else those of the first engine that supports the model's family, else the built-in
    ones. Parsers of different engines cannot be combined, so choosing one of them determines both.
    """
    built_in = found = vocabulary.parsers
    if given.tool or given.reasoning:
        if engine := engine_of(given.tool or given.reasoning):
            found = native_names(engine, built_in, vocabulary.template)
    else:
        offered = (native_names(engine, built_in, vocabulary.template) for engine in native)
        found = next((names for names in offered if _covers(names, built_in)), built_in)
    return ParserNames(given.tool or found.tool, given.reasoning or found.reasoning)


def _covers(native: ParserNames, built_in: ParserNames) -> bool:
    """Returns whether an engine has parsers of each kind for which there is a built-in one."""
    return bool(native.tool) >= bool(built_in.tool) and bool(native.reasoning) >= bool(built_in.reasoning)


class VocabularyRegistry:
    """Holds vocabularies by served model name.

    Args:
        specs: the models to serve.
        load_timeout_s: longest wait for a vocabulary to load.
        loader: loads a vocabulary; called in a thread.
        parsers: parsers that `auto` selects for a model, configured by the operator.
        native: returns the engines whose parsers `auto` prefers for a model, in order.
        check: raises SluiceError for unavailable parsers; a model whose card names them is not served.
        learn: waits up to a timeout for a model to be discovered and added; returns False if it was not.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        load_timeout_s: float = MAX_LOAD_S,
        loader: Callable[[ModelSpec], Vocabulary] = load,
        parsers: Mapping[str, ParserNames] = NO_OVERRIDES,
        native: Callable[[ModelSpec], Sequence[str]] = lambda spec: (),
        check: Callable[[ParserNames], None] = lambda names: None,
        learn: Callable[[str, float], Awaitable[bool]] | None = None,
    ) -> None:
        self._learn = learn
        self._specs = {spec.name: spec for spec in specs}
        self._timeout_s = load_timeout_s
        self._loader = loader
        self._parsers = parsers
        self._native = native
        self._check = check
        self._loaded: dict[str, Vocabulary] = {}
        self._loading: dict[str, asyncio.Task[Vocabulary]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by source, while loading

    def ready(self, model: str) -> Vocabulary | None:
        """Returns a vocabulary, or None until it is loaded; raises SluiceError (NOT_FOUND) for an unknown model."""
        vocabulary = self._loaded.pop(model, None)
        if vocabulary is not None:
            self._loaded[model] = vocabulary  # most recently used last, see by_use
        elif model not in self._specs and self._learn is None:
            raise self._unknown(model)
        return vocabulary

    def by_use(self) -> Sequence[str]:
        """Returns the names of the loaded models, least recently used first."""
        return tuple(self._loaded)

    def _unknown(self, model: str) -> SluiceError:
        names = ", ".join(sorted(self._specs)) or "none yet"
        return not_found(
            f"Model {quoted(model)} is not served here; available: {names}.", param="model", code="model_not_found"
        )

    async def add(self, spec: ModelSpec) -> None:
        """Adds a model, or replaces its files, once it is loaded; raises the error of a failed load.

        Running streams keep the vocabulary with which they started.
        """
        self._loaded[spec.name] = await self._loaded_from(spec)
        self._specs[spec.name] = spec

    async def _tables(self, spec: ModelSpec) -> Vocabulary:
        """Returns a vocabulary of its own whose tables are shared by discovered models with the same files."""
        for other in self._specs.values():
            same = (other.source, other.processor) == (spec.source, spec.processor)
            if spec.learned and other.learned and same and other.name in self._loaded:
                shared = copy(self._loaded[other.name])
                shared.parsers = shared.files_parsers
                return shared
        return await asyncio.to_thread(self._loader, spec)

    def remove(self, name: str) -> str:
        """Removes a discovered model; ignores unknown and configured ones. Running streams keep the vocabulary.

        Returns:
            The location of its files if no other model uses them; else empty.
        """
        spec = self._specs.get(name)
        if spec is None or not spec.learned:
            return ""
        del self._specs[name]
        vocabulary = self._loaded.pop(name, None)
        if vocabulary is None or any(other.source == vocabulary.source for other in self._loaded.values()):
            return ""
        return vocabulary.source

    async def get(self, model: str) -> Vocabulary:
        """Returns a vocabulary, loading it if needed; the next call retries a failed load.

        Raises:
            SluiceError: the model is not served, cannot be loaded, or did not load in time.
        """
        vocabulary = self.ready(model)
        if vocabulary is not None:
            return vocabulary
        loading = self._loading.get(model)
        if loading is None:
            loading = self._loading[model] = asyncio.create_task(self._load(model), name=f"load {model}")
            loading.add_done_callback(lambda done: self._ended(model, done))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(loading)
        except TimeoutError:
            raise SluiceError(
                ErrorKind.DEADLINE_EXCEEDED,
                f"The tokenizer of {model} did not load within {self._timeout_s:g} s; retry later.",
                param="model",
            ) from None

    async def _load(self, model: str) -> Vocabulary:
        if model not in self._specs and (self._learn is None or not await self._learn(model, self._timeout_s)):
            raise self._unknown(model)
        if model not in self._loaded:
            self._loaded[model] = await self._loaded_from(self._specs[model])
        return self._loaded[model]

    async def _loaded_from(self, spec: ModelSpec) -> Vocabulary:
        model = spec.name
        started = time.monotonic()
        try:
            async with self._locks.setdefault(spec.source, asyncio.Lock()):
                vocabulary = await self._tables(spec)
        except SluiceError:
            raise
        except Exception as error:
            log.exception("loading the tokenizer failed", extra={"model": model})
            raise internal(f"The tokenizer of {model} cannot be loaded; see the log of postprocess.") from error
        given = self._given(spec)
        vocabulary.files_parsers = vocabulary.parsers
        vocabulary.built_in = vocabulary.parsers if given == ParserNames() else None
        vocabulary.replaces_engine = False
        native = self._native(spec)
        vocabulary.parsers = chosen(given, vocabulary, native)
        if native and given == ParserNames() != vocabulary.parsers == vocabulary.built_in:
            log.warning(
                "using the built-in parsers: the engine has none for this model family",
                extra={"model": model, "engine": ",".join(native)},
            )
        if not vocabulary.parsers.tool and writes_tools(vocabulary.template):
            log.warning(
                "the chat template has tools, but no parser matches its calls: answers with tools are marked; set "
                "--tool-parsers MODEL=NAME",
                extra={"model": model},
            )
        log.info(
            "tokenizer is loaded",
            extra={
                "model": model,
                "size": vocabulary.size,
                "decoder": "table" if vocabulary.exact else "library",
                "tool_parser": vocabulary.parsers.tool or NONE,
                "reasoning_parser": vocabulary.parsers.reasoning or NONE,
                "seconds": round(time.monotonic() - started, 2),
            },
        )
        return vocabulary

    def _given(self, spec: ModelSpec) -> ParserNames:
        """Returns the configured parsers; settings take precedence over the model card."""
        settings = self._parsers.get(spec.name, ParserNames())
        names = ParserNames(settings.tool or spec.tool_parser, settings.reasoning or spec.reasoning_parser)
        self._check(names)
        return names

    def _ended(self, model: str, loading: asyncio.Task[Vocabulary]) -> None:
        self._loading.pop(model, None)
        if not loading.cancelled():
            loading.exception()  # marks the exception as retrieved in case no caller waits any more

    async def load_all(self) -> list[Vocabulary]:
        """Loads all models; raises the SluiceError of the first that fails."""
        return [await self.get(model) for model in self._specs]

    async def close(self) -> None:
        """Cancels running loads."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
