"""Output that follows a grammar, by llguidance: a mask over the vocabulary before each token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from services.common.errors import SluiceError, invalid
from services.worker.contract.capabilities import Capability
from services.worker.contract.generation import StructuredOutput

KINDS = frozenset(
    {Capability.GUIDED_JSON, Capability.GUIDED_REGEX, Capability.GUIDED_GRAMMAR, Capability.GUIDED_CHOICE}
)
_FORMATS: dict[str, Literal["json_schema", "regex", "grammar"]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}
ANY_OBJECT = '{"type": "object"}'


def available() -> bool:
    """Whether llguidance is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost; llguidance refuses what is over.

    Attributes:
        size: symbols of its productions.
        fuel: work of building its lexer, about 50 a microsecond.
        states: states of its lexer, 1 to 2 KB each, kept as long as the request.
        step_fuel: work of the lexer for one token, about 14 a microsecond; the whole batch waits for it.
        step_items: items of the parser for one token, about 20 a microsecond.
    """

    size: int = 200_000
    fuel: int = 1_000_000
    states: int = 50_000
    step_fuel: int = 200_000
    step_items: int = 50_000

    def as_llguidance(self) -> Any:
        """In llguidance's words."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            max_grammar_size=self.size,
            initial_lexer_fuel=self.fuel,
            max_lexer_states=self.states,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            verbose_errors=False,
        )


class Constraint:
    """One request's way through its grammar; used by the step thread only.

    Attributes:
        error: why it cannot be followed any further; empty while it can.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._ends = list(eos_token_ids)
        self._words = (vocab_size + 31) // 32
        self._vocab_size = vocab_size
        self._tensors: tuple[Any, Any] | None = None
        self.error = ""

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask: a bit for each token id, in whole 32-bit words."""
        return 4 * self._words

    def fill_mask(self, pointer: int) -> bool:
        """Writes which tokens can come next; False: nothing but the end can, and nothing was written.

        Args:
            pointer: address of `mask_bytes` bytes.
        """
        if self._matcher.is_stopped() or self._matcher.is_error():
            return False
        self._matcher.unsafe_compute_mask_ptr(pointer, self.mask_bytes)
        return True

    def mask(self, row: Any) -> None:
        """Rules out, in a row of logits [vocabulary], every token that cannot come next."""
        import torch

        if self._tensors is None:
            self._tensors = torch.zeros(self._words, dtype=torch.int32), torch.arange(self._words * 32) % 32
        bits, bit_of_id = self._tensors
        if not self.fill_mask(bits.data_ptr()):
            ends = row[self._ends]
            row.fill_(float("-inf"))
            row[self._ends] = ends
            return
        allowed = (bits.repeat_interleave(32) >> bit_of_id) & 1
        row.masked_fill_(allowed[: self._vocab_size].eq(0).to(row.device), float("-inf"))

    def took(self, token_id: int) -> None:
        """The token that was chosen; sets `error` when the grammar cannot be followed any further.

        A mask that went over a limit leaves nothing but the end of the answer, which must not look like one.
        """
        if self._matcher.is_error() or (not self._matcher.is_stopped() and not self._matcher.consume_token(token_id)):
            self.error = _first_line(self._matcher.get_error())


class Grammars:
    """Makes constraints for one model.

    Args:
        tokenizer_json: the text of the model's tokenizer.json.
        vocab_size: width of its logits.
        eos_token_ids: what may come when a grammar is through.
        limits: of each grammar.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits
    ) -> None:
        from llguidance import LLTokenizer

        self._limits = limits.as_llguidance()

        self._vocab_size = vocab_size
        self._ends = eos_token_ids
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def constraint(self, guided: StructuredOutput, resumed: list[int]) -> Constraint:
        """Compiles a grammar, which takes up to seconds within its limits, without the GIL: call it off the event loop.

        Args:
            guided: kind and document.
            resumed: tokens that were generated already, by an earlier worker.

        Raises:
            SluiceError: INVALID_ARGUMENT when the document is none of its kind or too complex.
        """
        from llguidance import LLMatcher

        try:
            grammar = _grammar(guided)
        except RecursionError:
            raise _refused(guided, "it is nested too deep") from None
        except (ValueError, TypeError) as error:
            raise _refused(guided, str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refused(guided, matcher.get_error())
        if resumed and not matcher.consume_tokens(resumed):
            raise _refused(guided, "the tokens generated so far do not follow it")
        return Constraint(matcher, self._vocab_size, self._ends)


def _grammar(guided: StructuredOutput) -> str:
    from llguidance import grammar_from

    if guided.kind == "json_object":
        return str(grammar_from("json_schema", ANY_OBJECT))
    if guided.kind == "choice":
        return str(grammar_from("choice", json.dumps(list(guided.grammar))))
    text = guided.grammar
    if not isinstance(text, str) or not text.strip():
        raise ValueError("it is empty")
    if guided.kind == "json_schema":
        json.loads(text)
    return str(grammar_from(_FORMATS[guided.kind], text))


def _refused(guided: StructuredOutput, problem: str) -> SluiceError:
    return invalid(
        f"The {guided.kind.replace('_', ' ')} in response_format cannot be used: {_first_line(problem)}.",
        param="response_format",
        code="invalid_value",
    )


def _first_line(problem: str) -> str:
    lines = problem.strip().splitlines()
    return lines[0][:300].rstrip(". ") if lines else "it cannot be read"
