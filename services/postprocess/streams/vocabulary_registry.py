"""The vocabularies this process serves: each loaded once, off the event loop, at start or on first use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from services.common.errors import ErrorKind, SluiceError, internal, invalid, not_found, quoted
from services.common.models import PROCESSORS, ModelSpec, detect_processor, resolve
from services.postprocess.detokenize import hf, mistral
from services.postprocess.detokenize.vocabulary import ParserNames, Vocabulary
from services.postprocess.parsers.detect import names_of, native_names, template_of
from services.postprocess.parsers.engines import engine_of
from services.postprocess.parsers.registry import NONE

log = logging.getLogger(__name__)

NO_OVERRIDES: Mapping[str, ParserNames] = {}


def load(spec: ModelSpec) -> Vocabulary:
    """Loads a vocabulary; takes seconds, so call it off the event loop.

    Raises:
        SluiceError: the source does not exist, holds no tokenizer, or the tokenizer is broken.
    """
    path = resolve(spec.source)
    # An implementation of the user's own decides ids; what an id means is in the files all the same.
    processor = spec.processor if spec.processor in PROCESSORS else detect_processor(path)
    try:
        vocabulary = mistral.load(path) if processor == "mistral" else hf.load(path)
        vocabulary.parsers = names_of(path, vocabulary.special_tokens)
        vocabulary.source, vocabulary.template = str(path.absolute()), template_of(path)
        return vocabulary
    except SluiceError:
        raise
    except ImportError as error:
        raise internal(f"The tokenizer of {spec.name} needs the package {error.name}.") from error
    except Exception as error:  # both libraries raise unrelated types for broken files
        raise invalid(
            f"The tokenizer of {spec.name} cannot be read ({type(error).__name__}: {error}).", param="model"
        ) from error


def chosen(given: ParserNames, vocabulary: Vocabulary, native: Sequence[str]) -> ParserNames:
    """Returns what `auto` means: the operator's choice, else the first engine's parsers that cover what the model's
    family needs, else the built-in ones.

    An engine's parser cannot be combined with another's, so the operator's choice of one decides about both.
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
    """Whether an engine has a parser wherever there is a built-in one."""
    return bool(native.tool) >= bool(built_in.tool) and bool(native.reasoning) >= bool(built_in.reasoning)


class VocabularyRegistry:
    """Vocabularies by served name.

    Args:
        specs: what to serve.
        load_timeout_s: how long anybody waits for one to load.
        loader: makes a vocabulary in a thread.
        parsers: what `auto` means for a model, where the operator knows better than its template.
        native: the engines whose own parsers `auto` prefers for a model, in this order.
        check: SluiceError for parsers that this process does not have; a model whose card names them is not served.

    Attributes:
        learn: waits, at most so many seconds, for a model that may become known by `add`; False when it will not.
    """

    learn: Callable[[str, float], Awaitable[bool]] | None = None

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        load_timeout_s: float,
        loader: Callable[[ModelSpec], Vocabulary] = load,
        parsers: Mapping[str, ParserNames] = NO_OVERRIDES,
        native: Callable[[ModelSpec], Sequence[str]] = lambda spec: (),
        check: Callable[[ParserNames], None] = lambda names: None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._timeout_s = load_timeout_s
        self._loader = loader
        self._parsers = parsers
        self._native = native
        self._check = check
        self._loaded: dict[str, Vocabulary] = {}
        self._loading: dict[str, asyncio.Task[Vocabulary]] = {}

    def ready(self, model: str) -> Vocabulary | None:
        """The vocabulary, None while it is not loaded; SluiceError(NOT_FOUND) for a model that will not be served."""
        vocabulary = self._loaded.pop(model, None)
        if vocabulary is not None:
            self._loaded[model] = vocabulary  # as the last, see by_use
        elif model not in self._specs and self.learn is None:
            raise self._unknown(model)
        return vocabulary

    def by_use(self) -> Sequence[str]:
        """Names of the models that are loaded, the least recently used first."""
        return tuple(self._loaded)

    def _unknown(self, model: str) -> SluiceError:
        names = ", ".join(sorted(self._specs)) or "none yet"
        return not_found(
            f"Model {quoted(model)} is not known here; there is {names}.", param="model", code="model_not_found"
        )

    async def add(self, spec: ModelSpec) -> None:
        """Serves one more model, or a known one with other files, once it is loaded; raises what the load raised.

        Streams that run keep the vocabulary they began with.
        """
        self._loaded[spec.name] = await self._loaded_from(spec)
        self._specs[spec.name] = spec

    def remove(self, name: str) -> str:
        """Serves a learned model no longer; unknown ones and those that the operator named are left alone.

        Streams that run keep its vocabulary.

        Returns:
            Where its files are, if no other model is read from there; else empty.
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
        """The vocabulary, loaded now if need be; a load that failed is tried again by the next caller.

        Raises:
            SluiceError: not served, cannot be loaded, or not loaded in time.
        """
        vocabulary = self.ready(model)
        if vocabulary is not None:
            return vocabulary
        loading = self._loading.get(model)
        if loading is None:
            loading = self._loading[model] = asyncio.create_task(self._load(model), name=f"load {model}")
            loading.add_done_callback(lambda done: self._ended(model, done))
        try:
            return await asyncio.wait_for(asyncio.shield(loading), self._timeout_s)
        except TimeoutError:
            raise SluiceError(
                ErrorKind.DEADLINE_EXCEEDED,
                f"The tokenizer of {model} did not load within {self._timeout_s:g} s.",
                param="model",
            ) from None

    async def _load(self, model: str) -> Vocabulary:
        if model not in self._specs and (self.learn is None or not await self.learn(model, self._timeout_s)):
            raise self._unknown(model)
        if model not in self._loaded:
            self._loaded[model] = await self._loaded_from(self._specs[model])
        return self._loaded[model]

    async def _loaded_from(self, spec: ModelSpec) -> Vocabulary:
        model = spec.name
        started = time.monotonic()
        try:
            vocabulary = await asyncio.to_thread(self._loader, spec)
        except SluiceError:
            raise
        except Exception as error:
            log.exception("loading the tokenizer failed", extra={"model": model})
            raise internal(f"The tokenizer of {model} cannot be loaded.") from error
        given = self._given(spec)
        vocabulary.built_in = vocabulary.parsers if given == ParserNames() else None
        native = self._native(spec)
        vocabulary.parsers = chosen(given, vocabulary, native)
        if native and given == ParserNames() != vocabulary.parsers == vocabulary.built_in:
            log.warning(
                "the built-in parsers are used: the engine has none for this family of models",
                extra={"model": model, "engine": ",".join(native)},
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
        """The operator's word counts before the card's."""
        operators = self._parsers.get(spec.name, ParserNames())
        names = ParserNames(operators.tool or spec.tool_parser, operators.reasoning or spec.reasoning_parser)
        self._check(names)
        return names

    def _ended(self, model: str, loading: asyncio.Task[Vocabulary]) -> None:
        self._loading.pop(model, None)
        if not loading.cancelled():
            loading.exception()  # seen here, in case all who waited for it have gone

    async def load_all(self) -> list[Vocabulary]:
        """Loads every model; SluiceError for the first that fails."""
        return [await self.get(model) for model in self._specs]

    async def close(self) -> None:
        """Stops waiting for loads under way."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
