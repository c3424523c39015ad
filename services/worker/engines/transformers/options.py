"""What `--engine-args` of the transformers engine may say."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import SluiceError, invalid
from services.worker.engines.arguments import read_options

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
POOLINGS = ("", "last", "mean", "cls")


@dataclass(frozen=True, slots=True)
class Options:
    """See `docs/engines-transformers.md`.

    Attributes:
        device: as torch names it; "auto" takes the first GPU, else the CPU.
        dtype: one of DTYPES; "auto" is the one in the model's files.
        attention: one of ATTENTIONS.
        memory_share: most of the free memory that cache and batch buffers may take, (0, 0.8].
        threads: CPU threads of torch; None leaves torch's choice.
        pooling: how hidden states become an embedding; empty: as the model's files say, and none if they do not.
        prefix_cache: whether finished prompts stay in the cache for the next one.
        trust_remote_code: whether code in the model's folder is run.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "sdpa"
    memory_share: float = 0.5
    threads: int | None = None
    pooling: str = ""
    prefix_cache: bool = True
    trust_remote_code: bool = False


def read(text: str) -> Options:
    """Raises SluiceError(INVALID_ARGUMENT) for what is unknown or out of range."""
    options = read_options(text, Options, "transformers")
    for name, value, allowed in (
        ("dtype", options.dtype, DTYPES),
        ("attention", options.attention, ATTENTIONS),
        ("pooling", options.pooling, POOLINGS),
    ):
        if value not in allowed:
            raise _refused(f"{name} is {value!r}; choose from {', '.join(filter(None, allowed))}.")
    if not 0 < options.memory_share <= 0.8:
        raise _refused("memory_share must be above 0 and at most 0.8.")
    if options.threads is not None and options.threads < 1:
        raise _refused("threads must be at least 1.")
    return options


def _refused(message: str) -> SluiceError:
    return invalid(f"transformers engine: {message}", param="engine_args")
