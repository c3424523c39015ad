"""Loads tokenizers and detokenizers outside the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from services.common.base.errors import SluiceError
from services.common.packages.model_files import ENGINE_PROCESSORS, ModelSpec
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.engine_names import engine_of
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from services.postprocess.streams.session import PostSession, SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from services.preprocess.contract.tokenizer import TokenizerProtocol
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.limits import Limits
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.probes import media_fingerprint, prompt_fingerprint
from services.worker.local_processing.batch_detokenizer import BatchDetokenizer
from services.worker.local_processing.prompts import PromptMaker

__all__ = ["ParserNames", "PromptMaker", "load_prompts", "load_texts", "off_loop", "spec_for", "template_limits"]

log = logging.getLogger(__name__)

TEMPLATE_S = 2.0
TEMPLATE_MB = 512
ROW_TOKENS = 1 << 20


def spec_for(spec: ModelSpec, engine: str) -> ModelSpec:
    """Returns the model with the processor for its prompts: the engine's own where it has one."""
    return replace(spec, processor=engine) if engine in ENGINE_PROCESSORS else spec


def template_limits(max_prompt_bytes: int) -> Limits:
    """Returns the resource limits of chat templates; the caller must close `foreign_templates`."""
    return Limits(max_prompt_bytes, TEMPLATE_S, TemplateProcesses(1, TEMPLATE_S, max_prompt_bytes, TEMPLATE_MB))


def load_prompts(
    spec: ModelSpec, engine: str, limits: Limits, cache_bytes: int, media: bool = False
) -> TokenizerProtocol:
    """Loads a model's tokenizer and adds the fingerprints to its facts; blocks for seconds.

    Args:
        engine: the engine, whose own processor makes the prompts where it has one.
        media: whether the engine takes media items, so that the media fingerprint is needed.

    Raises:
        SluiceError: as `load_tokenizer`.
    """
    own = spec_for(spec, engine)
    tokenizer = load_tokenizer(own, limits, encoder_options=EncoderOptions(cache_bytes=cache_bytes))
    tokenizer.facts = replace(
        tokenizer.facts,
        prompt_fingerprint=prompt_fingerprint(tokenizer),
        media_fingerprint=_media_fingerprint(tokenizer, spec, limits) if media else "",
    )
    return tokenizer


def _media_fingerprint(tokenizer: TokenizerProtocol, spec: ModelSpec, limits: Limits) -> str:
    """Returns the media fingerprint by the worker's tokenizer; empty if there is none.

    Without media items in an engine's own processor, the processor with rules for them reads the model's files again.
    """
    own = media_fingerprint(tokenizer)
    if own or tokenizer.facts.processor not in ENGINE_PROCESSORS:
        return own
    try:
        reader = load_tokenizer(spec, limits)
    except SluiceError as error:
        log.warning("the media fingerprint is unknown: %s", error.message)
        return ""
    try:
        return media_fingerprint(reader)
    finally:
        reader.close()


async def off_loop(load: Callable[[], TokenizerProtocol]) -> TokenizerProtocol:
    """Runs `load` in a thread; if the caller is cancelled meanwhile, closes the tokenizer once it is loaded."""
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        loading.add_done_callback(_close_unused)
        raise


def _close_unused(loading: asyncio.Future[TokenizerProtocol]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        threading.Thread(target=loading.result().close, name="close-tokenizer", daemon=True).start()


async def load_texts(
    spec: ModelSpec, parsers: ParserNames, on_death: Callable[[str, BaseException], None]
) -> tuple[BatchDetokenizer, StreamFactory]:
    """Loads a model's detokenizer and the stream factory it uses; close the factory after the detokenizer.

    Args:
        parsers: parsers that `auto` selects; empty: detected from the chat template. An engine's parsers run in a
            child process.
        on_death: called when a background task has failed.

    Raises:
        SluiceError: the vocabulary cannot be read, or a parser does not exist.
    """
    limits = SessionLimits(max_row_tokens=ROW_TOKENS)
    vocabularies = VocabularyRegistry([spec], parsers={spec.name: parsers})
    engines = {engine: "" for engine in map(engine_of, (parsers.tool, parsers.reasoning)) if engine}
    factory = StreamFactory(limits.stream, CustomParsers(engines=engines), on_death)
    try:
        vocabulary = await vocabularies.get(spec.name)
        await factory.start()
        await factory.prepare_for(vocabulary)
    except BaseException:
        await asyncio.shield(factory.close())
        raise
    metrics = Metrics()

    def session(wake: Callable[[], None]) -> PostSession:
        return PostSession(vocabularies, limits, metrics, wake, on_death, factory)

    return BatchDetokenizer(session, spec.name), factory
