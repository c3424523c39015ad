"""Media items in vLLM: kinds that its model takes, and prompts that its own loaders and processor make of files.

As in `library`, vLLM is imported when it is used.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from services.common.base.errors import SluiceError, invalid
from services.common.types.media.spans import MediaKind, content_hash
from services.worker.contract.generation import MediaItem
from services.worker.engines.shared.media_prompts import check_expansion, unexpanded
from services.worker.engines.vllm import library
from services.worker.engines.vllm.clip_decoding import ClipDecoder
from services.worker.engines.vllm.media_files import DecodedBudget, Load, load_of, readers_of

KNOWN_FILES = 1 << 18
"""Files whose kind is remembered; more than vLLM's caches hold."""


class MediaPrompts:
    """Makes prompts with media items for a started vLLM.

    Attributes:
        kinds: kinds of items that the model takes, without those whose files vLLM lacks packages for.
    """

    def __init__(self, llm: Any) -> None:
        """Asks vLLM for the model's kinds; logs a warning for a kind whose packages cannot be imported."""
        self._llm = llm
        self._loads: dict[MediaKind, Load] = {}
        self._decoder: ClipDecoder | None = None
        self._placeholders: frozenset[int] = frozenset()
        self.kinds: frozenset[MediaKind] = frozenset()
        self._first_kind: OrderedDict[bytes, MediaKind] = OrderedDict()
        processor = llm.renderer.mm_processor
        if processor is not None:
            readers = readers_of(llm.model_config, processor.info)
            self._loads = {kind: load_of(kind, each.options) for kind, each in readers.items() if not each.isolated}
            isolated = {kind: each.options for kind, each in readers.items() if each.isolated}
            self._decoder = ClipDecoder(isolated) if isolated else None
            self.kinds = frozenset(readers)
            self._placeholders = _placeholders(llm.model_config.hf_config, processor.info.get_hf_processor())

    async def start(self) -> None:
        """Starts the processes that read audio and videos, if the model takes any."""
        if self._decoder is not None:
            await self._decoder.start()

    async def close(self) -> None:
        """Ends the processes."""
        if self._decoder is not None:
            await self._decoder.close()

    async def prompt(self, token_ids: array[int], media: Sequence[MediaItem], cache_salt: str, generated: int) -> Any:
        """Returns a prompt with media items as a preprocessed vLLM input.

        The content hash is each item's identifier in vLLM's caches and events.

        Args:
            generated: number of tokens at the end that an earlier worker generated.

        Raises:
            SluiceError: INVALID_ARGUMENT for a file that vLLM rejects, INTERNAL when vLLM expands the prompt otherwise.
        """
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        short = unexpanded(token_ids, media, self._placeholders, generated)
        raw: dict[str, Any] = {
            "prompt_token_ids": short,
            "multi_modal_data": await self._decoded(media),
            "multi_modal_uuids": _by_kind(media, map(self._identifier, media)),
        }
        if cache_salt:
            raw["cache_salt"] = cache_salt
        renderer = self._llm.renderer
        try:
            parsed = parse_model_prompt(self._llm.model_config, raw)
            (prompt,) = await renderer.render_cmpl_async([parsed], renderer.default_cmpl_tok_params)
        except (AssertionError, RuntimeError) as error:  # vLLM's own, such as of an item without a placeholder
            raise invalid(f"vLLM rejected the media items: {library.first_line(error)}", param="media") from error
        except Exception as error:
            raise library.error_of(error) from error
        check_expansion(token_ids, prompt["prompt_token_ids"])
        return prompt

    async def _decoded(self, media: Sequence[MediaItem]) -> dict[str, list[Any]]:
        budget, found = DecodedBudget.full(), []
        for index, item in enumerate(media):
            kind = item.span.kind
            if kind not in self.kinds:
                raise invalid(
                    f"vLLM does not take media[{index}] of the kind {kind.capability} with this model; omit it.",
                    param="media",
                )
            try:
                found.append(await self._read(kind, item.file.data, budget))
            except SluiceError:
                raise
            except Exception as error:  # decoders raise many types for broken files
                reason = library.first_line(error).rstrip(".")
                raise invalid(
                    f"vLLM cannot read media[{index}] as {kind.capability}: {reason}; send a complete file.",
                    param="media",
                ) from error
        return _by_kind(media, found)

    async def _read(self, kind: MediaKind, data: bytes, budget: DecodedBudget) -> Any:
        """Returns a file as vLLM's loader does."""
        if self._decoder is None or kind in self._loads:
            return await asyncio.to_thread(self._loads[kind], data, budget)
        decoded = await self._decoder.decode(kind, data, budget)
        return decoded if kind is MediaKind.AUDIO else library.media_of(decoded, data)

    def _identifier(self, item: MediaItem) -> str:
        """Returns an item's identifier: its content hash, unless the same file was an item of another kind before.

        vLLM's caches know items by identifier only, and a film can be an audio clip as well. Other services cannot
        compute the identifier of its second kind, so their predictions leave out its blocks.
        """
        kind, content = item.span.kind, item.span.hash
        first = self._first_kind.setdefault(content, kind)
        self._first_kind.move_to_end(content)
        if len(self._first_kind) > KNOWN_FILES:
            self._first_kind.popitem(last=False)
        return (content if first is kind else content_hash(kind.capability.encode() + content)).hex()


def _by_kind(media: Sequence[MediaItem], values: Iterable[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item, value in zip(media, values, strict=True):
        found.setdefault(item.span.kind.capability, []).append(value)
    return found


def _placeholders(*sources: Any) -> frozenset[int]:
    """Returns the placeholder tokens of every kind, by the names that models' configs and processors have for them."""
    names = [f"{kind.capability}_token_{end}" for kind in MediaKind for end in ("id", "index")]
    found = (getattr(source, name, None) for source in sources for name in names)
    return frozenset(token for token in found if isinstance(token, int))
