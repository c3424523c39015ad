"""The prefix cache, as requests feel it."""

from __future__ import annotations

from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import ObservedStream
from sluice.conformance.refusals import UNSUPPORTED, call_refused, unclaimed
from sluice.conformance.rule import NotChecked, NotClaimed, expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

CLEAR = worker_pb2.ControlRequest.ACTION_CLEAR_CACHE


def _has_prefix_cache(subject: Subject) -> bool:
    return bool(subject.card.block_size) and subject.claims(Capability.KV_EVENTS)


def _prompt(subject: Subject) -> list[int]:
    """A few whole blocks and a bit."""
    if not _has_prefix_cache(subject):
        raise NotClaimed("The card has no block_size with kv_events: no prefix cache to look at.")
    return subject.block_prompt()


async def _ask(subject: Subject, prompt: list[int], salt: str = "") -> ObservedStream:
    request = subject.request(prompt, max_tokens=2)
    if salt:
        request.cache_salt = salt
    return await subject.ask(request)


@rule("prefix-cache", "The second request with a prompt says that it was cached.", "TokenExtra.cached_tokens")
async def prefix_cache(subject: Subject) -> str:
    prompt = _prompt(subject)
    first, second = await _ask(subject, prompt), await _ask(subject, prompt)
    block = subject.card.block_size
    expect(first.cached_tokens == 0, f"{first.cached_tokens} tokens of a prompt nobody sent before were cached.")
    expect(
        second.cached_tokens >= block,
        f"{second.cached_tokens} of {len(prompt)} tokens were cached; a block is {block}.",
    )
    expect(second.cached_tokens <= len(prompt), f"{second.cached_tokens} of {len(prompt)} tokens were cached.")
    return f"{second.cached_tokens} of {len(prompt)} tokens cached the second time."


@rule(
    "cached-usage", "The usage counts the same cached tokens as the first delta.", "common.proto, Usage.cached_tokens"
)
async def cached_usage(subject: Subject) -> str:
    prompt = _prompt(subject)
    await _ask(subject, prompt)
    second = await _ask(subject, prompt)
    counted = second.terminal.usage.cached_tokens
    expect(
        counted == second.cached_tokens, f"usage says {counted} cached tokens, the first delta {second.cached_tokens}."
    )
    return f"{counted} cached tokens in both."


@rule("cache-salt", "A cache salt keeps others out of the cache and its owner in.", "GenerateRequest.cache_salt")
async def cache_salt(subject: Subject) -> str:
    if not subject.claims(Capability.CACHE_SALT):
        request = subject.request()
        request.cache_salt = "tenant"
        await unclaimed(subject, request)
    prompt = _prompt(subject)
    await _ask(subject, prompt, "one")
    stranger, plain, owner = (
        await _ask(subject, prompt, "two"),
        await _ask(subject, prompt),
        await _ask(subject, prompt, "one"),
    )
    expect(stranger.cached_tokens == 0, f"Another salt found {stranger.cached_tokens} tokens in the cache.")
    expect(plain.cached_tokens == 0, f"A request without salt found {plain.cached_tokens} tokens in the cache.")
    expect(owner.cached_tokens > 0, "The same salt found nothing in the cache.")
    return f"{owner.cached_tokens} tokens cached for the same salt, none for others."


@rule("clear-cache", "After the cache was cleared nothing is cached.", "worker.proto, ACTION_CLEAR_CACHE")
async def clear_cache(subject: Subject) -> str:
    if not subject.claims(Capability.CLEAR_CACHE):
        call = subject.stub.Control(worker_pb2.ControlRequest(action=CLEAR))
        raise NotClaimed(f"Refused: {await call_refused(subject, call, *UNSUPPORTED)}")
    if not _has_prefix_cache(subject):
        await subject.control(CLEAR)
        raise NotChecked("It was accepted; the card has no block_size with kv_events to see what it does.")
    prompt = _prompt(subject)
    await _ask(subject, prompt)
    # An engine may refuse to clear what running requests hold; there are none now.
    await subject.settles(lambda load: load.running_requests + load.waiting_requests == 0)
    await subject.control(CLEAR)
    heard = await _ask(subject, prompt)
    expect(heard.cached_tokens == 0, f"{heard.cached_tokens} tokens were cached after the cache had been cleared.")
    return "Nothing of a known prompt was cached."
