"""From a model's name to its loaded tokenizer; slow, so never on an event loop."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.models import ENGINE_PROCESSORS, ModelSpec, detect_processor, resolve
from services.preprocess.encoders.options import EncoderOptions
from services.preprocess.limits import Limits
from services.preprocess.protocol import TokenizerProtocol
from services.preprocess.tokenizers.engine import EngineOptions, EngineTokenizer

NO_OPTIONS: Mapping[str, EngineOptions] = MappingProxyType({})
USUAL_SPEED = EncoderOptions()


def load_tokenizer(
    spec: ModelSpec,
    limits: Limits,
    engines: Mapping[str, EngineOptions] = NO_OPTIONS,
    encoder_options: EncoderOptions = USUAL_SPEED,
    template_file: Path | None = None,
) -> TokenizerProtocol:
    """Finds the model's files, downloading them if need be, and loads the implementation that reads them.

    Args:
        spec: its processor is "hf", "mistral", "vllm", "sglang", or `package.module:Class` of your own, called with the
            files' path; empty picks by what the files are.
        limits: of requests to the tokenizer.
        engines: by engine, how its processes are run; the defaults where it is not there.
        speed: what "hf" and "mistral" may do to be fast.
        template_file: chat template to use instead of the spec's and of the one that came with the files; "mistral"
            takes none.

    Raises:
        SluiceError: NOT_FOUND when there are no files, FAILED_PRECONDITION when they cannot be loaded.
    """
    try:
        path = resolve(spec.source)
        processor = spec.processor or detect_processor(path)
        template = spec.chat_template if template_file is None else template_file.read_text("utf-8")
        if template and processor not in ("hf", *ENGINE_PROCESSORS):
            raise invalid(f"The {processor} tokenizer of model {spec.name} takes no chat template.", param="model")
        return _load(spec, processor, path, limits, engines, encoder_options, template)
    except SluiceError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # native loaders raise whatever they like, panics included
        reason = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
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
        return EngineTokenizer(processor, path, options, template)
    # Imported here so that a replica pays only for what it serves.
    if processor == "hf":
        from services.preprocess.tokenizers.hf import HfTokenizer

        own = limits.own_templates(spec.name, spec.learned)
        try:
            return HfTokenizer(path, limits, encoder_options, template, own)
        except BaseException:
            own.close()
            raise
    if processor == "mistral":
        from services.preprocess.tokenizers.mistral import MistralTokenizer

        return MistralTokenizer(path, encoder_options)
    module, _, name = processor.partition(":")
    if not name:
        raise invalid(f"Processor {processor!r} is unknown.", param="model")
    made: TokenizerProtocol = getattr(importlib.import_module(module), name)(path)
    return made
