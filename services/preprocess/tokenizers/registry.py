"""The models this replica tokenizes for, each loaded once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

from services.common.errors import SluiceError, not_found, quoted, unavailable
from services.common.models import ModelSpec
from services.common.tasks import TaskOwner
from services.preprocess.protocol import TokenizerProtocol
from services.preprocess.tokenizers.probes import prompt_fingerprint

log = logging.getLogger(__name__)


class ModelRegistry:
    """Tokenizers by served name.

    Args:
        specs: the models.
        load: makes a tokenizer; runs in a thread, once per model however many requests wait for it. A failed load is
            tried again by the next request.
        wait_s: longest that one caller waits for a load, seconds.

    A tokenizer that is replaced or removed is closed once the requests that use it have ended, see `using`.

    Attributes:
        learn: waits, at most so many seconds, for a model that may become known by `add`; False when it will not.
    """

    learn: Callable[[str, float], Awaitable[bool]] | None = None

    def __init__(
        self, specs: Sequence[ModelSpec], load: Callable[[ModelSpec], TokenizerProtocol], wait_s: float = 60.0
    ) -> None:
        self._specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}
        self._load = load
        self._wait_s = wait_s
        self._loaded: dict[str, TokenizerProtocol] = {}
        self._loading: dict[str, asyncio.Future[TokenizerProtocol]] = {}
        self._uses: dict[int, int] = {}  # by identity: a user's class need not be hashable
        self._retired: dict[int, TokenizerProtocol] = {}
        self._tasks = TaskOwner()
        # Not the loop's own threads, for which the end of the process would wait.
        self._threads = ThreadPoolExecutor(thread_name_prefix="load")

    def __iter__(self) -> Iterator[tuple[ModelSpec, TokenizerProtocol | None]]:
        """All models by name, with their tokenizer where it is loaded."""
        return ((spec, self._loaded.get(name)) for name, spec in self._specs.items())

    def spec(self, name: str) -> ModelSpec:
        """What a name stands for; SluiceError(NOT_FOUND) lists the models that exist."""
        spec = self._specs.get(name)
        if spec is None:
            raise not_found(
                f"Model {quoted(name)} does not exist; this server has {', '.join(self._specs) or 'none yet'}.",
                param="model",
                code="model_not_found",
            )
        return spec

    async def get(self, name: str) -> TokenizerProtocol:
        """The tokenizer, loading it if need be.

        Raises:
            SluiceError: NOT_FOUND for an unknown model; UNAVAILABLE while the load takes longer than `wait_s`; what the
                load raised.
        """
        if name not in self._specs and self.learn is not None:
            await self.learn(name, self._wait_s)
        tokenizer = self._loaded.pop(name, None)
        if tokenizer is not None:
            self._loaded[name] = tokenizer  # as the last, see by_use
            return tokenizer
        task = self._task(self.spec(name))
        try:
            # One caller that gives up must not end the load for the others.
            return await asyncio.wait_for(asyncio.shield(task), self._wait_s)
        except TimeoutError:
            raise unavailable(f"The tokenizer of model {name} is still loading.", code="model_loading") from None

    def by_use(self) -> Sequence[str]:
        """Names of the models that are loaded, the least recently used first."""
        return tuple(self._loaded)

    async def add(self, spec: ModelSpec) -> None:
        """Serves one more model, or a known one with other files, once it is loaded; raises what the load raised."""
        tokenizer = await self._load_aside(spec)
        before = self._loaded.get(spec.name)
        self._specs = dict(sorted({**self._specs, spec.name: spec}.items()))
        self._loaded[spec.name] = tokenizer
        if before is not None:
            self._retire(before)

    def remove(self, name: str) -> None:
        """Serves a learned model no longer; unknown ones and those that the operator named are left alone."""
        spec = self._specs.get(name)
        if spec is None or not spec.learned:
            return
        self._specs = {other: known for other, known in self._specs.items() if other != name}
        tokenizer = self._loaded.pop(name, None)
        if tokenizer is not None:
            self._retire(tokenizer)

    @contextmanager
    def using(self, tokenizer: TokenizerProtocol) -> Iterator[TokenizerProtocol]:
        """Keeps a tokenizer from being closed; to be entered where `get` returns, before anything is awaited."""
        key = id(tokenizer)
        self._uses[key] = self._uses.get(key, 0) + 1
        try:
            yield tokenizer
        finally:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                if key in self._retired:
                    self._close_later(tokenizer)

    def _retire(self, tokenizer: TokenizerProtocol) -> None:
        self._retired[id(tokenizer)] = tokenizer
        if id(tokenizer) not in self._uses:
            self._close_later(tokenizer)

    def _close_later(self, tokenizer: TokenizerProtocol) -> None:
        del self._retired[id(tokenizer)]
        self._tasks.spawn(_end(tokenizer), "end tokenizer")

    async def preload(self) -> None:
        """Loads all models, however long it takes; raises what the first failing load raised."""
        await asyncio.gather(*(self._task(spec) for spec in self._specs.values()))

    def _load_aside(self, spec: ModelSpec) -> asyncio.Future[TokenizerProtocol]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._timed_load, spec)

    def _task(self, spec: ModelSpec) -> asyncio.Future[TokenizerProtocol]:
        """The load that is under way, or a new one."""
        task = self._loading.get(spec.name)
        if task is None:
            task = self._loading[spec.name] = self._load_aside(spec)
            task.add_done_callback(lambda done: self._ended(spec, done))
        return task

    def _timed_load(self, spec: ModelSpec) -> TokenizerProtocol:
        started = perf_counter()
        tokenizer = self._load(spec)
        facts = tokenizer.facts = replace(tokenizer.facts, prompt_fingerprint=prompt_fingerprint(tokenizer))
        fields = {"model": spec.name, "processor": facts.processor, "vocab_size": facts.vocab_size}
        log.info("tokenizer is loaded", extra={**fields, "seconds": round(perf_counter() - started, 2)})
        return tokenizer

    def _ended(self, spec: ModelSpec, task: asyncio.Future[TokenizerProtocol]) -> None:
        del self._loading[spec.name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if self._specs.get(spec.name) is spec:
                self._loaded[spec.name] = task.result()
            else:  # other files took its place meanwhile, or it was removed
                self._retire(task.result())
            return
        reason = error.message if isinstance(error, SluiceError) else type(error).__name__
        log.warning("tokenizer cannot be loaded", extra={"model": spec.name, "reason": reason})

    async def close(self) -> None:
        """Gives up what is still loading, whose thread ends with the process, and ends tokenizers that have an end."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for tokenizer in (*self._loaded.values(), *self._retired.values()):
            await _end(tokenizer)
        await self._tasks.close()


async def _end(tokenizer: TokenizerProtocol | None) -> None:
    """Closes a tokenizer that can be closed; an error of its own is logged."""
    end = getattr(tokenizer, "close", None)
    if end is None:
        return
    try:
        await asyncio.to_thread(end)
    except Exception:  # a user's class may fail in every way
        log.exception("a tokenizer fails when it is closed")
