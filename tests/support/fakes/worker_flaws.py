"""One flaw for each rule of the conformance kit, by the rule's name."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import unpack_u32
from services.common.types.media.spans import content_hash
from sluice.v1 import common_pb2, worker_pb2
from tests.support.fakes.broken_workers import (
    Action,
    Extra,
    Honest,
    Predicate,
    Request,
    Seen,
    anonymous,
    failure,
    fresh_id,
    ids_of,
)

FLAWS: dict[str, Callable[[], Honest]] = {}


def breaks(rule: str) -> Callable[[type[Honest]], type[Honest]]:
    """The flaw that only this rule finds."""

    def register(flaw: type[Honest]) -> type[Honest]:
        FLAWS[rule] = flaw
        return flaw

    return register


class WrongRefusal(Honest):
    """Refuses some requests as if the worker were at fault."""

    def __init__(self, matches: Predicate) -> None:
        super().__init__()
        self._matches = matches

    def refuses(self, seen: Seen, together: Sequence[Seen]) -> SluiceError | None:
        return failure() if self._matches(seen.request) else None


class Forgets(Honest):
    """Serves requests without a part of them."""

    def __init__(self, forget: Callable[[Request], Any]) -> None:
        super().__init__()
        self._forget = forget

    def request(self, request: Request) -> None:
        self._forget(request)


class Claims(Honest):
    """Claims what the engine does not honour."""

    def __init__(self, capability: str) -> None:
        super().__init__()
        self._capability = capability

    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        if self._capability not in info.card.capabilities:
            info.card.capabilities.append(self._capability)


class ControlFlaw(Honest):
    """Answers some actions without doing anything, and others with an error."""

    def __init__(self, quiet: int, failing: int | None = None) -> None:
        super().__init__()
        self._quiet, self._failing = quiet, failing

    def control(self, request: worker_pb2.ControlRequest) -> worker_pb2.ControlResponse | SluiceError | None:
        if request.action == self._quiet:
            return worker_pb2.ControlResponse()
        return failure() if request.action == self._failing else None


def only(field: Any) -> Callable[[Request], None]:
    """Forgets one field, and asks with plain ids instead of what stood there as the prompt."""

    def forget(request: Request) -> None:
        if request.HasField(field):
            request.ClearField(field)
            if request.WhichOneof("prompt") is None:
                request.tokens.token_ids = b"\x10\0\0\0"

    return forget


def _forget_guided(kind: str) -> Callable[[Request], None]:
    return lambda request: request.ClearField("guided") if request.guided.WhichOneof("grammar") == kind else None


def _forget_role(role: int) -> Callable[[Request], None]:
    def forget(request: Request) -> None:
        if request.disaggregation.role == role and len(request.disaggregation.handoff) < 2:
            request.ClearField("disaggregation")

    return forget


def _alone(seen: Seen) -> bool:
    """One stop id that is no end of sequence."""
    stops, eos = seen.request.stop.stop_token_ids, seen.request.stop.eos_token_ids
    return len(stops) == 4 and unpack_u32(stops)[0] not in unpack_u32(eos)


def _prefix_test(request: Request) -> bool:
    return not request.cache_salt and request.stop.max_tokens == 2


BAD: dict[str, Predicate] = {
    "bad-token-ids": lambda request: max(ids_of(request), default=0) >= 542,
    "bad-empty-prompt": lambda request: request.WhichOneof("prompt") == "tokens" and not request.tokens.token_ids,
    "bad-long-prompt": lambda request: len(ids_of(request)) > 10_000,
    "bad-packed-ids": lambda request: len(request.tokens.token_ids) % 4 != 0,
    "bad-lengths": lambda request: request.stop.max_tokens == 0,
    "bad-sampling": lambda request: request.sampling.top_p > 1,
    "bad-model": lambda request: request.model.endswith("-that-is-not-served"),
    "bad-lora": lambda request: request.lora == "adapter-that-is-not-loaded",
    "bad-request-id": lambda request: not request.request_id,
    "bad-handoff": lambda request: b"not a handoff" in request.disaggregation.handoff,
    "bad-engine-options": lambda request: request.sampling.engine_options_json == b"[1,",
    "bad-stop-ids": lambda request: len(request.stop.stop_token_ids) % 4 != 0,
    "bad-rank": lambda request: request.data_parallel_rank >= 7,
    # Good requests that only one rule sends.
    "eight-interleaved": lambda request: request.stop.max_tokens == 16,
    "many-on-one-session": lambda request: request.stop.max_tokens == 9,
    "priority": lambda request: request.priority == 5,
    "lora": lambda request: request.lora == "polite",
    "sampling-options": lambda request: request.sampling.seed == 7 and request.stop.max_tokens == 12,
    "unclaimed-options": lambda request: request.sampling.top_k == 5,
}
FORGETS: dict[str, Callable[[Request], Any]] = {
    "text-prompt": only("text"),
    "messages-prompt": only("messages_json"),
    "prompt-embeds": only("embeds"),
    "text-out": only("postprocess"),
    "data-parallel-rank": lambda request: (
        request.ClearField("data_parallel_rank") if request.data_parallel_rank < 7 else None
    ),
    "engine-options": lambda request: (
        request.sampling.ClearField("engine_options_json")
        if request.sampling.engine_options_json.startswith(b"{")
        else None
    ),
    "guided-json": _forget_guided("json_schema"),
    "guided-regex": _forget_guided("regex"),
    "guided-choice": _forget_guided("choice"),
    "guided-grammar": _forget_guided("ebnf"),
    "structural-tag": _forget_guided("structural_tag"),
    "prefill": _forget_role(common_pb2.WORKER_ROLE_PREFILL),
    "decode": _forget_role(common_pb2.WORKER_ROLE_DECODE),
    "cache-salt": lambda request: request.ClearField("cache_salt"),
    "min-tokens": lambda request: None if request.stop.ignore_eos else request.stop.ClearField("min_tokens"),
    "ignore-eos": lambda request: (
        request.stop.ClearField("ignore_eos") if len(request.stop.eos_token_ids) == 4 else None
    ),
}
CLAIMS = {"allowed-token-ids": "allowed_token_ids", "logit-bias": "logit_bias", "bad-words": "bad_words"}
CONTROLS = {
    "clear-cache": (Action.ACTION_CLEAR_CACHE, None),
    "sleep": (Action.ACTION_SLEEP, Action.ACTION_WAKE),
    "profile": (Action.ACTION_START_PROFILE, Action.ACTION_STOP_PROFILE),
    "inject-fault": (Action.ACTION_INJECT_FAULT, None),
    "lora-loading": (Action.ACTION_LOAD_LORA, None),
    "bad-action": (Action.ACTION_UNSPECIFIED, None),
}
FLAWS.update({rule: partial(WrongRefusal, matches) for rule, matches in BAD.items()})
FLAWS.update({rule: partial(Forgets, forget) for rule, forget in FORGETS.items()})
FLAWS.update({rule: partial(Claims, name) for rule, name in CLAIMS.items()})
FLAWS.update({rule: partial(ControlFlaw, *actions) for rule, actions in CONTROLS.items()})


@breaks("image")
class ImageCountedTwice(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if seen.request.tokens.media and extra.usage.prompt_tokens:
            extra.usage.prompt_tokens += 1
        return [extra]


@breaks("image-missing")
class MissingWithoutCode(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.error.code == "media_missing":
            extra.error.code = ""
        return [extra]


@breaks("image-hash")
class UsesAnyFile(Honest):
    """Keeps a file under the hash that its sender states."""

    def __init__(self) -> None:
        super().__init__()
        self._contents: dict[bytes, bytes] = {}

    def part(self, chunk: worker_pb2.MediaChunk) -> None:
        stated, chunk.hash = chunk.hash, content_hash(chunk.data)
        self._contents[stated] = chunk.hash

    def request(self, request: Request) -> None:
        for span in request.tokens.media:
            span.hash = self._contents.get(span.hash, span.hash)


@breaks("info")
class EpochMoves(Honest):
    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        self.ghosts += 1
        info.epoch += self.ghosts


@breaks("card")
class CapabilityTwice(Honest):
    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        info.card.capabilities.append("token_ids")


@breaks("tokenizer-files")
class TokenizerSpoiled(Honest):
    def chunk(self, chunk: worker_pb2.TokenizerChunk) -> None:
        chunk.data = chunk.data.replace(b"e", b"E")


@breaks("info-under-load")
class SlowInfo(Honest):
    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        if self.live > 16:
            await asyncio.sleep(5)


@breaks("one-terminal")
class EndsTwice(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        return [extra, extra] if extra.finish_reason and seen.request.stop.max_tokens == 1 else [extra]


@breaks("batch-form")
class CountTooMuch(Honest):
    def batch(self, batch: worker_pb2.TokenBatch) -> None:
        batch.counts += b"\0\0\0\0"


@breaks("first-delta")
class CachedAgain(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason and seen.tokens:
            extra.cached_tokens = seen.cached
        return [extra]


@breaks("vocabulary")
class StrangeId(Honest):
    def tokens(self, seen: Seen, ids: list[int]) -> list[int]:
        return [542, *ids[1:]] if ids and not seen.tokens and seen.request.stop.max_tokens == 32 else ids


@breaks("usage")
class CountsPromptWrong(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason and len(ids_of(seen.request)) == 7:
            extra.usage.prompt_tokens += 1
        return [extra]


@breaks("typed-status")
class BareStatus(Honest):
    async def generate_refused(self, context: Any, error: SluiceError) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, error.message)


@breaks("max-tokens")
class OneTooMany(Honest):
    def crash_reason(self, seen: Seen, extra: Extra) -> list[int]:
        return [20] if seen.request.stop.max_tokens == 40 else []


@breaks("stop-ids")
class GoesOnAfterStop(Honest):
    def crash_reason(self, seen: Seen, extra: Extra) -> list[int]:
        return [20] if _alone(seen) and extra.HasField("stop_token_id") else []


@breaks("stop-id-reported")
class StopUnnamed(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason and _alone(seen):
            extra.ClearField("stop_token_id")
        return [extra]


@breaks("eos")
class EndUnnamed(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason and len(seen.request.stop.eos_token_ids) == 4:
            extra.ClearField("stop_token_id")
        return [extra]


class Fickle(Honest):
    """Answers a request otherwise when it comes a second time."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[bytes] = set()

    def changes(self, request: Request) -> bool:
        """Which requests it answers so."""
        return True

    def tokens(self, seen: Seen, ids: list[int]) -> list[int]:
        if not ids or seen.tokens or not self.changes(seen.request):
            return ids
        known = anonymous(seen.request) in self._known
        self._known.add(anonymous(seen.request))
        return [ids[0] ^ 1, *ids[1:]] if known else ids


@breaks("greedy")
class FickleGreedy(Fickle):
    def changes(self, request: Request) -> bool:
        return not request.sampling.HasField("seed") and request.stop.max_tokens == 24

    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        if "temperature" not in info.card.capabilities:
            info.card.capabilities.append("temperature")


@breaks("seed")
class FickleSeed(Fickle):
    def changes(self, request: Request) -> bool:
        return request.sampling.HasField("seed")


@breaks("session-equals-generate")
class OtherWords(Honest):
    def generated(self, delta: worker_pb2.GenerateDelta) -> None:
        if delta.token_ids:
            delta.token_ids = bytes([delta.token_ids[0] ^ 1]) + delta.token_ids[1:]


@breaks("slot-reuse")
class SlotsUsedUp(Honest):
    def refuses(self, seen: Seen, together: Sequence[Seen]) -> SluiceError | None:
        return failure() if seen.slot in seen.session.used else None


@breaks("unknown-cancel")
class StrictCancel(Honest):
    def cancels(self, slots: list[int]) -> None:
        if 4_000_000 in slots:
            raise ValueError("no such slot")


@breaks("duplicate-request-id")
class TakesTwins(Honest):
    def __init__(self) -> None:
        super().__init__()
        self._known: set[str] = set()

    def request(self, request: Request) -> None:
        if request.request_id in self._known:
            request.request_id = fresh_id()
        elif request.request_id:
            self._known.add(request.request_id)


@breaks("neighbours")
class FailsTogether(Honest):
    def refuses(self, seen: Seen, together: Sequence[Seen]) -> SluiceError | None:
        wrong = [one for one in together if one.request.model.endswith("-that-is-not-served")]
        return failure() if wrong and len(together) == 4 else None


@breaks("cancel")
class CancelIsLength(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason and seen.cancelled:
            extra.finish_reason = common_pb2.FINISH_REASON_LENGTH
        return [extra]


@breaks("cancelled-usage")
class BillsTooMuch(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason and seen.cancelled:
            extra.usage.completion_tokens += 3
        return [extra]


@breaks("abort")
class AbortDenies(Honest):
    def aborted(self, answer: worker_pb2.AbortResponse) -> None:
        answer.found = False


@breaks("caller-gone")
class KeepsOrphans(Honest):
    slow = True

    def dropped(self, live: int) -> None:
        self.ghosts += live


@breaks("generate-dropped")
class KeepsDropped(Honest):
    slow = True

    def generate_dropped(self) -> None:
        self.ghosts += 1


@breaks("logprobs")
class Improbable(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if seen.request.output.logprobs and extra.logprobs:
            extra.logprobs[0].top[0].logprob = 0.5
        return [extra]


@breaks("logprobs-of-chosen")
class TellsMore(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if seen.request.output.HasField("logprobs") and not seen.request.output.logprobs:
            for position in extra.logprobs:
                position.top.extend([common_pb2.TokenLogprob(token_id=1), common_pb2.TokenLogprob(token_id=2)])
        return [extra]


@breaks("prompt-logprobs")
class ForgetsPositions(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        del extra.prompt_logprobs[:2]
        return [extra]


@breaks("prefix-cache")
class CacheUnsaid(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if _prefix_test(seen.request):
            if extra.HasField("cached_tokens"):
                extra.cached_tokens = 0
            if extra.HasField("usage"):
                extra.usage.cached_tokens = 0
        return [extra]


@breaks("cached-usage")
class CacheUnbilled(Honest):
    def extra(self, seen: Seen, extra: Extra) -> list[Extra]:
        if extra.finish_reason:
            extra.usage.cached_tokens = 0
        return [extra]


@breaks("embeddings")
class NoNumber(Honest):
    def embedded(
        self, request: worker_pb2.EmbedRequest, answer: worker_pb2.EmbedResponse | SluiceError
    ) -> worker_pb2.EmbedResponse | SluiceError:
        if len(request.inputs) != 3:
            return answer
        if isinstance(answer, SluiceError):
            return worker_pb2.EmbedResponse()
        answer.embeddings[0].values = array("f", [float("nan")]).tobytes() + answer.embeddings[0].values[4:]
        return answer


@breaks("embedding-dimensions")
class OneValueMore(Honest):
    def embedded(
        self, request: worker_pb2.EmbedRequest, answer: worker_pb2.EmbedResponse | SluiceError
    ) -> worker_pb2.EmbedResponse | SluiceError:
        if request.dimensions and not isinstance(answer, SluiceError):
            answer.embeddings[0].values += b"\0\0\0\0"
        return answer


@breaks("bad-embedding-input")
class EmbedFails(Honest):
    def embedded(
        self, request: worker_pb2.EmbedRequest, answer: worker_pb2.EmbedResponse | SluiceError
    ) -> worker_pb2.EmbedResponse | SluiceError:
        two = len(request.inputs) == 1 and len(request.inputs[0].token_ids) == 8
        return failure(ErrorKind.INTERNAL) if two else answer


@breaks("health")
class Unwell(Honest):
    serving = False


@breaks("reflection")
class NoReflection(Honest):
    reflection = False


@breaks("load-returns")
class LeaksBlocks(Honest):
    slow = True

    async def info(self, info: worker_pb2.GetInfoResponse) -> None:
        info.load.used_blocks += 3
