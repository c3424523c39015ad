"""Options of the transformers engine in `--engine-args`."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.base.errors import SluiceError, invalid
from services.worker.engines.shared.arguments import read_options
from services.worker.engines.transformers.guidance import GrammarLimits

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
POOLINGS = ("", "last", "mean", "cls")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the engine; documented in `docs/engines-transformers.md`.

    Attributes:
        device: Device name of torch; "auto" selects the first GPU, else the CPU.
        dtype: One of DTYPES; "auto" uses the data type in the model's files.
        attention: One of ATTENTIONS.
        memory_share: Maximum share of the free memory for cache and batch buffers, in (0, 0.8].
        threads: Number of CPU threads of torch; None uses torch's default.
        pooling: Pooling of embeddings; empty: from the model's files, or no embeddings.
        prefix_cache: Whether finished requests' blocks stay cached for reuse.
        trust_remote_code: Whether to run code from the model's folder.
        grammar_size: Maximum number of symbols in a request's grammar.
        grammar_fuel: Maximum work to build its lexer, in llguidance units; 50,000 take about a millisecond.
        grammar_states: Maximum number of lexer states, 1 to 2 KB each.
        grammar_step_fuel: Maximum work of the lexer per token; 14,000 delay the batch by about a millisecond.
        grammar_step_items: Maximum number of parser items per token; 20,000 take about a millisecond.
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
        """Limits of each grammar."""
        return GrammarLimits(
            self.grammar_size,
            self.grammar_fuel,
            self.grammar_states,
            self.grammar_step_fuel,
            self.grammar_step_items,
        )


def read(text: str) -> Options:
    """Parses `--engine-args`; raises SluiceError(INVALID_ARGUMENT) for unknown options and invalid values."""
    options = read_options(text, Options, "transformers")
    for name, value, allowed in (
        ("dtype", options.dtype, DTYPES),
        ("attention", options.attention, ATTENTIONS),
        ("pooling", options.pooling, POOLINGS),
    ):
        if value not in allowed:
            raise _invalid_option(f"invalid {name} {value!r}; choose from {', '.join(filter(None, allowed))}.")
    if not 0 < options.memory_share <= 0.8:
        raise _invalid_option("memory_share must be above 0 and at most 0.8.")
    for name in ("grammar_size", "grammar_fuel", "grammar_states", "grammar_step_fuel", "grammar_step_items"):
        if getattr(options, name) < 1:
            raise _invalid_option(f"{name} must be at least 1.")
    if options.threads is not None and options.threads < 1:
        raise _invalid_option("threads must be at least 1.")
    return options


def _invalid_option(message: str) -> SluiceError:
    return invalid(f"transformers engine: {message}", param="engine_args")
