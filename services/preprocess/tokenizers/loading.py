"""Loads the tokenizer of a model; slow, so never called on an event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from services.common.base.errors import ErrorKind, SluiceError, first_line, invalid
from services.common.packages.model_files import ENGINE_PROCESSORS, PROCESSORS, ModelSpec, detect_processor, resolve
from services.preprocess.contract.tokenizer import TokenizerProtocol
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.limits import Limits
from services.preprocess.tokenizers.custom import load_custom
from services.preprocess.tokenizers.engine_extensions import EngineOptions, engine_tokenizer

NO_OPTIONS: Mapping[str, EngineOptions] = MappingProxyType({})
DEFAULT_ENCODER_OPTIONS = EncoderOptions()


def load_tokenizer(
    spec: ModelSpec,
    limits: Limits,
    engines: Mapping[str, EngineOptions] = NO_OPTIONS,
    encoder_options: EncoderOptions = DEFAULT_ENCODER_OPTIONS,
    template_file: Path | None = None,
) -> TokenizerProtocol:
    """Finds the model's files, downloading them if necessary, and loads the implementation that reads them.

    Args:
        spec: its processor is "hf", "mistral", "vllm", "sglang", or a custom `package.module:Class`, called with the
            files' path; empty to detect it from the files.
        limits: limits of requests.
        engines: options of the processes by engine; the defaults for missing engines.
        encoder_options: optimizations for "hf" and "mistral".
        template_file: chat template that replaces those of the spec and the files; not supported by "mistral".

    Raises:
        SluiceError: NOT_FOUND when there are no files, FAILED_PRECONDITION when they cannot be loaded.
    """
    try:
        path = resolve(spec.source)
        processor = spec.processor or detect_processor(path)
        template = spec.chat_template if template_file is None else template_file.read_text("utf-8")
        if template and processor not in ("hf", *ENGINE_PROCESSORS):
            raise invalid(
                f"The {processor} tokenizer of model {spec.name} does not support chat templates.", param="model"
            )
        return _load(spec, processor, path, limits, engines, encoder_options, template)
    except SluiceError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # native loaders raise arbitrary types, including Rust panics
        reason = first_line(error, 200) or type(error).__name__
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"The tokenizer of model {spec.name} cannot be loaded: {reason}.",
            param="model",
        ) from error


def _load(
    spec: ModelSpec,
    processor: str,
    path: Path,
    limits: Limits,
    engines: Mapping[str, EngineOptions],
    encoder_options: EncoderOptions,
    template: str,
) -> TokenizerProtocol:
    if processor in ENGINE_PROCESSORS:
        options = replace(engines.get(processor) or EngineOptions(), foreign=spec.learned)
        return engine_tokenizer(processor, path, options, template)
    # Imported here so that a replica only loads what it serves.
    if processor == "hf":
        from services.preprocess.tokenizers.hf import HfTokenizer

        own = limits.own_templates(spec.name, spec.learned)
        try:
            processors = [replace(options, foreign=spec.learned) for options in engines.values()]
            return HfTokenizer(path, limits, encoder_options, template, own, processors)
        except BaseException:
            own.close()
            raise
    if processor == "mistral":
        from services.preprocess.tokenizers.mistral import MistralTokenizer

        return MistralTokenizer(path, encoder_options)
    if ":" not in processor:
        known = ", ".join((*PROCESSORS, *ENGINE_PROCESSORS))
        raise invalid(f"Processor {processor!r} is unknown; use {known} or package.module:Class.", param="model")
    return load_custom(processor, spec.name, path)
