"""What a sequence says beside its tokens, where it was asked for."""

from __future__ import annotations

from services.worker.contract.engine import Sink
from services.worker.engines.mock.probabilities import logprobs_at, prompt_logprobs
from services.worker.engines.mock.sequence import Sequence


def begin(sequence: Sequence, sink: Sink, vocab_size: int) -> None:
    """The first token is about to come."""
    request = sequence.request
    if request.prompt_logprobs is None:
        sink.begin(sequence.cached_tokens)
    else:
        sink.begin(sequence.cached_tokens, prompt_logprobs(request.token_ids, request.prompt_logprobs, vocab_size))


def push_with_logprobs(sequence: Sequence, sink: Sink, token_id: int, vocab_size: int) -> None:
    """The token that the sequence just got."""
    wanted = sequence.request.logprobs or 0
    sink.push((token_id,), (logprobs_at(token_id, sequence.known - 1, wanted, vocab_size),))
