"""Rules about the prefix cache, as observed by requests."""

from __future__ import annotations

from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked, NotClaimed
from sluice.conformance.observed_stream import ObservedStream
from sluice.conformance.refusals import UNSUPPORTED, expect_call_refused, expect_unsupported
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

CLEAR = worker_pb2.ControlRequest.ACTION_CLEAR_CACHE


def _has_prefix_cache(subject: Subject) -> bool:
    return bool(subject.card.block_size) and subject.claims(Capability.KV_EVENTS)


def _prompt(subject: Subject) -> list[int]:
    if not _has_prefix_cache(subject):
        raise NotClaimed("The card has no block_size with kv_events, hence no observable prefix cache.")
    return subject.block_prompt()


async def _ask(subject: Subject, prompt: list[int], salt: str = "") -> ObservedStream:
    request = subject.request(prompt, max_tokens=2)
    if salt:
        request.cache_salt = salt
    return await subject.complete(request)


def _cached(stream: ObservedStream) -> int:
    """Returns the cached tokens of a request; some engines count them only at the end."""
    return max(stream.cached_tokens, int(stream.terminal.usage.cached_tokens))


@rule("prefix-cache", "The second request with a prompt reports cached tokens.", "TokenExtra.cached_tokens")
async def prefix_cache(subject: Subject) -> str:
    prompt = _prompt(subject)
    first, second = await _ask(subject, prompt), await _ask(subject, prompt)
    block = subject.card.block_size
    expect(_cached(first) == 0, f"{_cached(first)} tokens of a new prompt were cached.")
    cached = _cached(second)
    expect(cached >= block, f"{cached} of {len(prompt)} tokens were cached; a block is {block}.")
    expect(cached <= len(prompt), f"{cached} of {len(prompt)} tokens were cached.")
    return f"{cached} of {len(prompt)} tokens were cached for the second request."


@rule(
    "cached-usage",
    "The usage has the same cached_tokens as the first delta, unless that has 0 because they are counted at the end.",
    "common.proto, Usage.cached_tokens",
)
async def cached_usage(subject: Subject) -> str:
    prompt = _prompt(subject)
    await _ask(subject, prompt)
    second = await _ask(subject, prompt)
    counted = second.terminal.usage.cached_tokens
    expect(
        second.cached_tokens in (0, counted),
        f"usage has {counted} cached tokens, the first delta {second.cached_tokens}.",
    )
    return f"The usage has {counted} cached tokens, the first delta {second.cached_tokens}."


@rule("cache-salt", "Cached blocks are shared only among requests with the same salt.", "GenerateRequest.cache_salt")
async def cache_salt(subject: Subject) -> str:
    if not subject.claims(Capability.CACHE_SALT):
        request = subject.request()
        request.cache_salt = "tenant"
        await expect_unsupported(subject, request)
    prompt = _prompt(subject)
    await _ask(subject, prompt, "one")
    other, plain, same = (
        await _ask(subject, prompt, "two"),
        await _ask(subject, prompt),
        await _ask(subject, prompt, "one"),
    )
    expect(_cached(other) == 0, f"A request with another salt found {_cached(other)} tokens in the cache.")
    expect(_cached(plain) == 0, f"A request without salt found {_cached(plain)} tokens in the cache.")
    expect(_cached(same) > 0, "A request with the same salt found no tokens in the cache.")
    return f"{_cached(same)} tokens were cached for the same salt, none for others."


@rule("clear-cache", "After clearing the cache, no tokens are cached.", "worker.proto, ACTION_CLEAR_CACHE")
async def clear_cache(subject: Subject) -> str:
    if not subject.claims(Capability.CLEAR_CACHE):
        call = subject.stub.Control(worker_pb2.ControlRequest(action=CLEAR))
        raise NotClaimed(f"Refused: {await expect_call_refused(subject, call, *UNSUPPORTED)}")
    if not _has_prefix_cache(subject):
        await subject.control(CLEAR)
        raise NotChecked("Accepted; the effect is not observable, because the card has no block_size with kv_events.")
    prompt = _prompt(subject)
    await _ask(subject, prompt)
    # An engine may refuse to clear blocks of running requests.
    await subject.wait_for_load(lambda load: load.running_requests + load.waiting_requests == 0)
    await subject.control(CLEAR)
    stream = await _ask(subject, prompt)
    expect(_cached(stream) == 0, f"{_cached(stream)} tokens were cached after clearing the cache.")
    return "No tokens of an earlier prompt were cached."
