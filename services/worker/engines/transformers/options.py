"""What `--engine-args` of the transformers engine may say."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import SluiceError, invalid
from services.worker.engines.shared.arguments import read_options
from services.worker.engines.transformers.guidance import GrammarLimits

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
        grammar_size: most symbols of a request's grammar.
        grammar_fuel: most work of building its lexer, in units of llguidance; 50,000 are about a millisecond.
        grammar_states: most states of its lexer, 1 to 2 KB each.
        grammar_step_fuel: most work of the lexer for one token; 14,000 are about a millisecond of the whole batch.
        grammar_step_items: most items of the parser for one token; 20,000 are about a millisecond.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "sdpa"
    memory_share: float = 0.5
    threads: int | None = None
    pooling: str = ""
    prefix_cache: bool = True
    trust_remote_code: bool = False
    grammar_size: int = 200_000
    grammar_fuel: int = 1_000_000
    grammar_states: int = 50_000
    grammar_step_fuel: int = 200_000
    grammar_step_items: int = 50_000

    @property
    def grammar_limits(self) -> GrammarLimits:
        """Those of each grammar."""
        return GrammarLimits(
            self.grammar_size,
            self.grammar_fuel,
            self.grammar_states,
            self.grammar_step_fuel,
            self.grammar_step_items,
        )


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
    for name in ("grammar_size", "grammar_fuel", "grammar_states", "grammar_step_fuel", "grammar_step_items"):
        if getattr(options, name) < 1:
            raise _refused(f"{name} must be at least 1.")
    if options.threads is not None and options.threads < 1:
        raise _refused("threads must be at least 1.")
    return options


def _refused(message: str) -> SluiceError:
    return invalid(f"transformers engine: {message}", param="engine_args")
