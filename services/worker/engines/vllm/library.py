"""Everything that is imported of vLLM, and nothing of it before `start`: tested with vLLM 0.32."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.errors import ErrorKind, SluiceError, invalid
from services.worker.contract.generation import PromptEmbeds
from services.worker.engines.shared import crash_reason
from services.worker.engines.vllm import core
from services.worker.engines.vllm.options import flags

OnStats = Callable[[int, Any], None]
"""Called with a data-parallel rank and vLLM's SchedulerStats, once a step."""

_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM's processes talk over sockets of their own
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare(settings_log_level: str) -> str:
    """Imports vLLM, which takes seconds, and gives its version.

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
            ErrorKind.FAILED_PRECONDITION, f"vLLM cannot be imported in this environment: {error}.", param="engine"
        ) from error
    return str(vllm.__version__)


def read_arguments(line: Sequence[str]) -> Any:
    """vLLM's own reading of its flags; SluiceError(INVALID_ARGUMENT) with what its parser says."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise _refused(message)

    try:
        return AsyncEngineArgs.from_cli_args(AsyncEngineArgs.add_cli_args(Parser(prog="vllm")).parse_args(list(line)))
    except (ValueError, TypeError) as error:
        raise _refused(str(error)) from error


def is_given(line: Sequence[str], option: str) -> bool:
    """Whether a flag, or one below it, is on a command line."""
    names = [
        flag.lstrip("-").partition("=")[0].partition(".")[0].replace("-", "_") for flag in line if flag[:2] == "--"
    ]
    return option in names or f"no_{option}" in names


def add_defaults(line: Sequence[str], defaults: Mapping[str, Any]) -> list[str]:
    """A command line with what the worker wants where the user said nothing."""
    return [*line, *flags({name: value for name, value in defaults.items() if not is_given(line, name)})]


def launch(arguments: Any, on_stats: OnStats) -> Any:
    """An AsyncLLM with its engine process running; blocks until the weights are loaded.

    Raises:
        SluiceError: INVALID_ARGUMENT when the options do not fit the model, FAILED_PRECONDITION when its process fails.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Stats(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._rank = engine_index

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_stats(self._rank, scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Says nothing."""

    with core.speaking() as words:
        try:
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[Stats])
        except (ValueError, TypeError, NotImplementedError) as error:
            if missing := crash_reason.missing_from(arguments.model):
                raise invalid(missing, param="model") from error
            raise invalid(f"vLLM cannot serve this model so: {_first_line(error)}", param="engine_args") from error
        except RuntimeError as error:
            said = crash_reason.read(words)
            why = _of_worker(said) or said or f"{_first_line(error)} Its log says why."
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"vLLM's engine did not start: {why}") from error


def prompt_of(token_ids: array[int] | Sequence[int], cache_salt: str) -> Any:
    """Token ids as an input that needs no more processing."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids), cache_salt=cache_salt or None)


def embeds_of(embeds: PromptEmbeds, cache_salt: str, model_config: Any) -> Any:
    """Prompt embeddings in the model's own precision.

    Their ids are one that no token has. Without ids vLLM's penalties count those that happen to lie in the batch's
    memory, which are other callers' prompts.

    Raises:
        SluiceError: INVALID_ARGUMENT for those of another width, which the engine's process would not survive, and for
            numbers that are not finite.
    """
    import torch
    from vllm.inputs.engine import embeds_input

    width = int(model_config.get_hidden_size())
    if embeds.width != width:
        raise invalid(
            f"The rows of prompt_embeds are {embeds.width} wide; this model's are {width}.", param="prompt_embeds"
        )
    rows = torch.frombuffer(bytearray(embeds.values), dtype=torch.float32).reshape(-1, width).to(model_config.dtype)
    if not bool(torch.isfinite(rows).all()):
        raise invalid("prompt_embeds holds a number that is not finite.", param="prompt_embeds")
    return embeds_input(
        rows,
        cache_salt=cache_salt or None,
        prompt_token_ids=[int(model_config.get_vocab_size())] * embeds.length,
        is_token_ids=[False] * embeds.length,
    )


def sampling_params(arguments: Mapping[str, Any]) -> Any:
    """SamplingParams of a mapped request, for deltas of token ids without text."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    known = dict(arguments)
    bad_words = known.pop("bad_words_token_ids", None)
    guided = known.pop("structured_outputs", None)
    try:
        params = SamplingParams(
            **known,
            structured_outputs=StructuredOutputsParams(**guided) if guided else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
    except (ValueError, TypeError) as error:
        raise invalid(f"vLLM refuses the request: {_first_line(error)}") from error
    if bad_words:
        params._bad_words_token_ids = bad_words
    return params


def checked(
    llm: Any, request_id: str, prompt: Any, params: Any, tasks: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """A request as `add_request` takes it without checking it again; compiles its grammar, which may take seconds.

    Args:
        tasks: what AsyncLLM.get_supported_tasks answers.
        options: further arguments of `add_request`.

    Raises:
        SluiceError: as `error_of`.
    """
    try:
        return llm.input_processor.process_inputs(request_id, prompt, params, supported_tasks=tasks, **options)
    except Exception as error:
        raise error_of(error) from error


def pooling_params(dimensions: int) -> Any:
    """For one embedding."""
    from vllm.pooling_params import PoolingParams

    return PoolingParams(task="embed", dimensions=dimensions or None)


def vector_bytes(vector: Any) -> bytes:
    """A tensor as little-endian float32."""
    import torch

    return bytes(vector.detach().to(torch.float32).cpu().contiguous().numpy().astype("<f4").tobytes())


def lora_request(name: str, number: int, path: str) -> Any:
    """An adapter as requests name it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def error_of(error: BaseException) -> SluiceError:
    """vLLM's failure of one request in the house's taxonomy."""
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, SluiceError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_is_gone()
    if isinstance(error, GracefulHTTPError):
        return SluiceError(ErrorKind.OVERLOADED, f"vLLM takes no more requests now: {_first_line(error)}")
    if isinstance(error, RetryableRequestError):
        return SluiceError(ErrorKind.UNAVAILABLE, f"vLLM asks to try again: {_first_line(error)}")
    if isinstance(error, VLLMClientError | ValueError | TypeError):
        return invalid(f"vLLM refuses the request: {_first_line(error)}")
    return SluiceError(ErrorKind.INTERNAL, "The engine failed on this request.")


def engine_is_gone() -> SluiceError:
    """What requests hear whose engine process died."""
    return SluiceError(
        ErrorKind.ENGINE_SHUTDOWN, "vLLM's engine process is gone; another worker can serve the request."
    )


def metrics_text() -> str:
    """vLLM's own Prometheus metrics."""
    from prometheus_client import REGISTRY, generate_latest

    names = [name for name in REGISTRY._names_to_collectors if name.startswith("vllm:")]
    return generate_latest(REGISTRY.restricted_registry(names)).decode() if names else ""


def _refused(message: str) -> SluiceError:
    return invalid(f"vLLM refuses its options: {message}", param="engine_args")


def _of_worker(words: str) -> str:
    """What went wrong in a process below the engine's; empty: nothing did."""
    return words.partition("Worker failed with error '")[2].rpartition("', please check")[0]


def _first_line(error: BaseException) -> str:
    """Enough of a message to act on; validation libraries write pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and "validation error" in lines[0]:
        said = lines[1] if " error, " in lines[1] else lines[2]
        return said.partition(" error, ")[2].partition(" [type=")[0] or said.partition(" [type=")[0]
    return (lines[0] if lines else type(error).__name__)[:500]
