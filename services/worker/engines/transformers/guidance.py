"""Output that follows a grammar, by llguidance: a mask over the vocabulary before each token."""

from __future__ import annotations

import json
from typing import Any

from services.common.errors import SluiceError, invalid
from services.worker.capabilities import Capability
from services.worker.generation import Guided

KINDS = frozenset(
    {Capability.GUIDED_JSON, Capability.GUIDED_REGEX, Capability.GUIDED_GRAMMAR, Capability.GUIDED_CHOICE}
)
_FORMATS = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}
ANY_OBJECT = '{"type": "object"}'


def available() -> bool:
    """Whether llguidance is installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


class Constraint:
    """One request's way through its grammar; used by the step thread only."""

    def __init__(self, matcher: Any, words: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        import torch

        self._matcher = matcher
        self._ends = list(eos_token_ids)
        self._bits = torch.zeros(words, dtype=torch.int32)
        self._bit_of_id = torch.arange(words * 32) % 32
        self._vocab_size = vocab_size
        self.error = ""

    def mask(self, row: Any) -> None:
        """Rules out, in a row of logits [vocabulary], every token that cannot come next."""
        if self._matcher.is_stopped() or self._matcher.is_error():
            ends = row[self._ends]
            row.fill_(float("-inf"))
            row[self._ends] = ends
            return
        self._matcher.unsafe_compute_mask_ptr(self._bits.data_ptr(), self._bits.numel() * 4)
        allowed = (self._bits.repeat_interleave(32) >> self._bit_of_id) & 1
        row.masked_fill_(allowed[: self._vocab_size].eq(0).to(row.device), float("-inf"))

    def took(self, token_id: int) -> None:
        """The token that was chosen."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            self.error = self._matcher.get_error()


class Grammars:
    """Makes constraints for one model.

    Args:
        tokenizer_json: the text of the model's tokenizer.json.
        vocab_size: width of its logits.
        eos_token_ids: what may come when a grammar is through.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        from llguidance import LLTokenizer

        self._vocab_size = vocab_size
        self._words = (vocab_size + 31) // 32
        self._ends = eos_token_ids
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    def constraint(self, guided: Guided, resumed: list[int]) -> Constraint:
        """Compiles a grammar, which may take a while: call it off the event loop.

        Args:
            guided: kind and document.
            resumed: tokens that were generated already, by an earlier worker.

        Raises:
            SluiceError: INVALID_ARGUMENT when the document is none of its kind or too complex.
        """
        from llguidance import LLMatcher

        try:
            grammar = _grammar(guided)
        except (ValueError, TypeError) as error:
            raise _refused(guided, str(error)) from error
        if problem := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise _refused(guided, problem)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(guided, matcher.get_error())
        if resumed and not matcher.consume_tokens(resumed):
            raise _refused(guided, "the tokens generated so far do not follow it")
        return Constraint(matcher, self._words, self._vocab_size, self._ends)


def _grammar(guided: Guided) -> str:
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


def _refused(guided: Guided, problem: str) -> SluiceError:
    first_line = problem.strip().splitlines()[0] if problem.strip() else "it cannot be read"
    return invalid(
        f"The {guided.kind.replace('_', ' ')} in response_format cannot be used: {first_line.rstrip('.')}.",
        param="response_format",
    )
