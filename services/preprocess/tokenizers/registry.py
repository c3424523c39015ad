"""The models this replica tokenizes for, each loaded once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

from services.common.base.errors import SluiceError, not_found, quoted, unavailable
from services.common.base.tasks import TaskOwner
from services.common.packages.model_files import ModelSpec
from services.preprocess.contract.tokenizer import TokenizerProtocol
from services.preprocess.tokenizers.probes import media_fingerprint, prompt_fingerprint

log = logging.getLogger(__name__)

MAX_LOAD_WAIT_S = 60.0
"""Seconds that a request waits for its tokenizer; then UNAVAILABLE, and the load goes on."""


class ModelRegistry:
    """Tokenizers by served name.

    A tokenizer that is replaced or removed is closed once the requests that use it have ended, see `using`. Discovered
    models with the same files and template share one: workers choose how many names they give to a model.

    Args:
        specs: the models.
        load: loads a tokenizer; runs in a thread, once per model however many requests wait for it. The next request
            retries a failed load.
        wait_s: maximum wait of one caller for a load, seconds.
        shared_by: returns what discovered models must have in common to share a tokenizer.
        learn: waits, at most the given seconds, for a model to be added with `add`; returns False when it will not be.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        load: Callable[[ModelSpec], TokenizerProtocol],
        wait_s: float = MAX_LOAD_WAIT_S,
        shared_by: Callable[[ModelSpec], Hashable] = lambda spec: (spec.source, spec.processor, spec.chat_template),
        learn: Callable[[str, float], Awaitable[bool]] | None = None,
    ) -> None:
        self._learn = learn
        self._specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}
        self._load = load
        self._wait_s = wait_s
        self._shared_by = shared_by
        self._adding: dict[Hashable, asyncio.Future[TokenizerProtocol]] = {}
        self._loaded: dict[str, TokenizerProtocol] = {}
        self._loading: dict[str, asyncio.Future[TokenizerProtocol]] = {}
        self._uses: dict[int, int] = {}  # by identity: a custom class need not be hashable
        self._retired: dict[int, TokenizerProtocol] = {}
        self._tasks = TaskOwner()
        # Not the loop's default executor, which would delay the exit of the process.
        self._threads = ThreadPoolExecutor(thread_name_prefix="load")

    def __iter__(self) -> Iterator[tuple[ModelSpec, TokenizerProtocol | None]]:
        """Iterates over all models by name, with their tokenizer if loaded."""
        return ((spec, self._loaded.get(name)) for name, spec in self._specs.items())

    def spec(self, name: str) -> ModelSpec:
        """Returns the spec of a served name; raises SluiceError(NOT_FOUND) with the models that exist."""
        spec = self._specs.get(name)
        if spec is None:
            raise not_found(
                f"Model {quoted(name)} does not exist; this server has {', '.join(self._specs) or 'none yet'}.",
                param="model",
                code="model_not_found",
            )
        return spec

    async def get(self, name: str) -> TokenizerProtocol:
        """Returns the tokenizer, loading it if necessary.

        Raises:
            SluiceError: NOT_FOUND for an unknown model; UNAVAILABLE when the load exceeds `wait_s`; the load's error.
        """
        if name not in self._specs and self._learn is not None:
            await self._learn(name, self._wait_s)
        tokenizer = self._loaded.pop(name, None)
        if tokenizer is not None:
            self._loaded[name] = tokenizer  # reinserted as the most recently used, see by_use
            return tokenizer
        task = self._load_task(self.spec(name))
        try:
            # Shielded: a caller that times out must not cancel the load for others.
            async with asyncio.timeout(self._wait_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise unavailable(
                f"The tokenizer of model {name} is still loading; retry shortly.", code="model_loading"
            ) from None

    def by_use(self) -> Sequence[str]:
        """Returns the names of the loaded models, least recently used first."""
        return tuple(self._loaded)

    async def add(self, spec: ModelSpec) -> None:
        """Adds a model, or replaces one with new files, once it is loaded; raises any error of the load."""
        tokenizer = await self._shared(spec) if spec.learned else await self._load_in_thread(spec)
        before = self._loaded.get(spec.name)
        self._specs = dict(sorted({**self._specs, spec.name: spec}.items()))
        self._loaded[spec.name] = tokenizer
        if before is not None:
            self._retire_unshared(before)

    async def _shared(self, spec: ModelSpec) -> TokenizerProtocol:
        """Returns the tokenizer of a discovered model that has the same files and template; loads the first one."""
        key = self._shared_by(spec)
        for other in self._specs.values():
            if other.learned and other.name in self._loaded and self._shared_by(other) == key:
                return self._loaded[other.name]
        task = self._adding.get(key)
        if task is None:
            task = self._adding[key] = self._load_in_thread(spec)
            # After the callers, which then hold the tokenizer.
            task.add_done_callback(lambda _: asyncio.get_running_loop().call_soon(self._adding.pop, key))
        return await asyncio.shield(task)

    def remove(self, name: str) -> None:
        """Removes a discovered model; ignores unknown and configured ones."""
        spec = self._specs.get(name)
        if spec is None or not spec.learned:
            return
        self._specs = {other: known for other, known in self._specs.items() if other != name}
        tokenizer = self._loaded.pop(name, None)
        if tokenizer is not None:
            self._retire_unshared(tokenizer)

    @contextmanager
    def using(self, tokenizer: TokenizerProtocol) -> Iterator[TokenizerProtocol]:
        """As `hold`, and `release` at the end."""
        self.hold(tokenizer)
        try:
            yield tokenizer
        finally:
            self.release(tokenizer)

    def hold(self, tokenizer: TokenizerProtocol) -> None:
        """Keeps a tokenizer from being closed; call it right after `get` returns, before awaiting anything."""
        key = id(tokenizer)
        self._uses[key] = self._uses.get(key, 0) + 1

    def release(self, tokenizer: TokenizerProtocol) -> None:
        """Ends a use of a tokenizer, which is closed after the last one if it is retired."""
        key = id(tokenizer)
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            if key in self._retired:
                self._close_later(tokenizer)

    def _retire_unshared(self, tokenizer: TokenizerProtocol) -> None:
        if all(other is not tokenizer for other in self._loaded.values()):
            self._retire(tokenizer)

    def _retire(self, tokenizer: TokenizerProtocol) -> None:
        self._retired[id(tokenizer)] = tokenizer
        if id(tokenizer) not in self._uses:
            self._close_later(tokenizer)

    def _close_later(self, tokenizer: TokenizerProtocol) -> None:
        del self._retired[id(tokenizer)]
        self._tasks.spawn(_close(tokenizer), "end tokenizer")

    async def preload(self) -> None:
        """Loads all models, however long it takes; raises the error of the first load that fails."""
        await asyncio.gather(*(self._load_task(spec) for spec in self._specs.values()))

    def _load_in_thread(self, spec: ModelSpec) -> asyncio.Future[TokenizerProtocol]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._timed_load, spec)

    def _load_task(self, spec: ModelSpec) -> asyncio.Future[TokenizerProtocol]:
        """Returns the running load of a model, or starts one."""
        task = self._loading.get(spec.name)
        if task is None:
            task = self._loading[spec.name] = self._load_in_thread(spec)
            task.add_done_callback(lambda done: self._on_loaded(spec, done))
        return task

    def _timed_load(self, spec: ModelSpec) -> TokenizerProtocol:
        started = perf_counter()
        tokenizer = self._load(spec)
        facts = tokenizer.facts = replace(
            tokenizer.facts,
            prompt_fingerprint=prompt_fingerprint(tokenizer),
            media_fingerprint=media_fingerprint(tokenizer),
        )
        fields = {"model": spec.name, "processor": facts.processor, "vocab_size": facts.vocab_size}
        log.info("tokenizer is loaded", extra={**fields, "seconds": round(perf_counter() - started, 2)})
        return tokenizer

    def _on_loaded(self, spec: ModelSpec, task: asyncio.Future[TokenizerProtocol]) -> None:
        del self._loading[spec.name]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if self._specs.get(spec.name) is spec:
                self._loaded[spec.name] = task.result()
            else:  # it was replaced or removed meanwhile
                self._retire(task.result())
            return
        reason = error.message if isinstance(error, SluiceError) else type(error).__name__
        log.warning("tokenizer failed to load", extra={"model": spec.name, "reason": reason})

    async def close(self) -> None:
        """Cancels running loads, whose threads end with the process, and closes the tokenizers."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tokenizers = {id(tokenizer): tokenizer for tokenizer in (*self._loaded.values(), *self._retired.values())}
        for tokenizer in tokenizers.values():
            await _close(tokenizer)
        await self._tasks.close()


async def _close(tokenizer: TokenizerProtocol) -> None:
    """Closes a tokenizer; logs its errors."""
    try:
        await asyncio.to_thread(tokenizer.close)
    except Exception:  # a custom class may raise anything
        log.exception("closing a tokenizer failed")
