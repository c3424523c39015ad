"""Constrains output to a grammar with llguidance, which masks the vocabulary before each token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from services.common.base.errors import SluiceError, invalid
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
    """Returns whether llguidance is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Maximum cost of one grammar; llguidance rejects grammars that exceed it.

    Attributes:
        size: Number of symbols in the productions.
        fuel: Work to build the lexer; about 50 units per microsecond.
        states: Number of lexer states, 1 to 2 KB each, allocated until the request ends.
        step_fuel: Work of the lexer per token, about 14 units per microsecond; it delays the whole batch.
        step_items: Number of parser items per token, about 20 per microsecond.
    """

    size: int = 200_000
    fuel: int = 1_000_000
    states: int = 50_000
    step_fuel: int = 200_000
    step_items: int = 50_000

    def as_llguidance(self) -> Any:
        """Returns the limits as llguidance's LLParserLimits."""
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
    """The grammar state of one request; used by the batching thread only.

    Attributes:
        error: Reason why generation cannot continue under the grammar; empty if it can.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._words = (vocab_size + 31) // 32
        self._vocab_size = vocab_size
        self._tensors: tuple[Any, Any] | None = None
        self.error = ""

    @property
    def mask_bytes(self) -> int:
        """Size of a mask in bytes: one bit per token id, rounded up to 32-bit words."""
        return 4 * self._words

    def fill_mask(self, pointer: int) -> bool:
        """Writes the mask of allowed tokens; returns False, without writing, if only the end of sequence is allowed.

        Args:
            pointer: Address of a buffer of `mask_bytes` bytes.
        """
        if self._matcher.is_stopped() or self._matcher.is_error():
            return False
        self._matcher.unsafe_compute_mask_ptr(pointer, self.mask_bytes)
        return True

    def mask(self, row: Any) -> None:
        """Sets the logits [vocabulary] of tokens that are not allowed to negative infinity, in place."""
        import torch

        if self._tensors is None:
            self._tensors = torch.zeros(self._words, dtype=torch.int32), torch.arange(self._words * 32) % 32
        bits, bit_of_id = self._tensors
        if not self.fill_mask(bits.data_ptr()):
            ends = row[self._eos_token_ids]
            row.fill_(float("-inf"))
            row[self._eos_token_ids] = ends
            return
        allowed = (bits.repeat_interleave(32) >> bit_of_id) & 1
        row.masked_fill_(allowed[: self._vocab_size].eq(0).to(row.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        """Advances the grammar by a sampled token; sets `error` when it cannot.

        A mask computation that exceeds a limit allows only the end of sequence, which must not pass as a regular end.
        """
        if self._matcher.is_error() or (not self._matcher.is_stopped() and not self._matcher.consume_token(token_id)):
            self.error = _first_line(self._matcher.get_error())


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer_json: Contents of the model's tokenizer.json.
        vocab_size: Width of the model's logits.
        eos_token_ids: Ids allowed after the grammar is complete.
        limits: Limits of each grammar.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits
    ) -> None:
        from llguidance import LLTokenizer

        self._limits = limits.as_llguidance()
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def constraint(self, guided: StructuredOutput, resumed: list[int]) -> Constraint:
        """Compiles a grammar, which may take seconds without holding the GIL; call it off the event loop.

        Args:
            guided: The constraint.
            resumed: Tokens that another worker already generated for the request.

        Raises:
            SluiceError: INVALID_ARGUMENT when the grammar is invalid or too complex.
        """
        from llguidance import LLMatcher

        try:
            grammar = _grammar(guided)
        except RecursionError:
            raise _invalid_grammar(guided, "it is nested too deeply") from None
        except (ValueError, TypeError) as error:
            raise _invalid_grammar(guided, str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _invalid_grammar(guided, matcher.get_error())
        if resumed and not matcher.consume_tokens(resumed):
            raise _invalid_grammar(guided, "the tokens generated so far do not match it")
        return Constraint(matcher, self._vocab_size, self._eos_token_ids)


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


def _invalid_grammar(guided: StructuredOutput, problem: str) -> SluiceError:
    return invalid(
        f"Invalid {guided.kind.replace('_', ' ')} in response_format: {_first_line(problem)}.",
        param="response_format",
        code="invalid_value",
    )


def _first_line(problem: str) -> str:
    lines = problem.strip().splitlines()
    return lines[0][:300].rstrip(". ") if lines else "it cannot be parsed"
