"""Loads what makes prompts and texts, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

from services.common.models import ENGINE_PROCESSORS, ModelSpec
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.engines import engine_of
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from services.preprocess.encoders.options import EncoderOptions
from services.preprocess.limits import Limits
from services.preprocess.protocol import TokenizerProtocol
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.probes import prompt_fingerprint
from services.worker.local_processing.batch_detokenizer import BatchDetokenizer
from services.worker.local_processing.prompts import PromptMaker

__all__ = ["ParserNames", "PromptMaker", "load_prompts", "load_texts", "off_loop", "spec_for", "template_limits"]

TEMPLATE_S = 2.0
TEMPLATE_MB = 512
ROW_TOKENS = 1 << 20
LOAD_S = 300.0


def spec_for(spec: ModelSpec, engine: str) -> ModelSpec:
    """The model with the processor that makes its prompts here: the engine's own code where it has some."""
    return replace(spec, processor=engine) if engine in ENGINE_PROCESSORS else spec


def template_limits(max_prompt_bytes: int) -> Limits:
    """What chat templates may use up; its `foreign_templates` are to be closed."""
    return Limits(max_prompt_bytes, TEMPLATE_S, TemplateProcesses(1, TEMPLATE_S, max_prompt_bytes, TEMPLATE_MB))


def load_prompts(spec: ModelSpec, limits: Limits, cache_bytes: int) -> TokenizerProtocol:
    """A model's tokenizer with its prompt fingerprint among its facts; takes seconds, so never on an event loop.

    Raises:
        SluiceError: as `load_tokenizer`.
    """
    tokenizer = load_tokenizer(spec, limits, encoder_options=EncoderOptions(cache_bytes=cache_bytes))
    tokenizer.facts = replace(tokenizer.facts, prompt_fingerprint=prompt_fingerprint(tokenizer))
    return tokenizer


async def off_loop(load: Callable[[], TokenizerProtocol]) -> TokenizerProtocol:
    """What `load` returns or raises; a tokenizer whose caller has gone meanwhile is ended."""
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        loading.add_done_callback(_end_late)
        raise


def _end_late(loading: asyncio.Future[TokenizerProtocol]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        threading.Thread(target=_end, args=(loading.result(),), name="end-tokenizer", daemon=True).start()


def _end(tokenizer: TokenizerProtocol) -> None:
    """Gives back what a tokenizer holds, such as its processes; blocks for a while."""
    close = getattr(tokenizer, "close", None)
    if close is not None:
        close()


async def load_texts(
    spec: ModelSpec, parsers: ParserNames, on_death: Callable[[str, BaseException], None]
) -> tuple[BatchDetokenizer, StreamFactory]:
    """What makes a model's texts; the opener is to be closed after the desk.

    Args:
        parsers: what `auto` means; empty ones as the model's template tells. An engine's own run in a process.
        on_death: a background task failed.

    Raises:
        SluiceError: the vocabulary cannot be read, or there is no such parser.
    """
    limits = SessionLimits(max_row_tokens=ROW_TOKENS)
    library = VocabularyRegistry([spec], LOAD_S, parsers={spec.name: parsers})
    engines = {engine: "" for engine in map(engine_of, (parsers.tool, parsers.reasoning)) if engine}
    opener = StreamFactory(limits.stream, CustomParsers(engines=engines), on_death)
    try:
        vocabulary = await library.get(spec.name)
        await opener.start()
        await opener.prepare_for(vocabulary)
    except BaseException:
        await asyncio.shield(opener.close())
        raise
    metrics = Metrics()

    def session(wake: Callable[[], None]) -> PostSession:
        return PostSession(library, limits, metrics, wake, on_death, opener)

    return BatchDetokenizer(session, spec.name), opener
