"""Describes media items for the mock engine: decodes pictures off the event loop, within bounds."""

from __future__ import annotations

import asyncio
import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.common.errors import SluiceError, invalid
from services.common.media.spans import MediaFile, MediaKind
from services.common.tasks import TaskOwner
from services.worker.contract.generation import MediaItem
from services.worker.engines.mock.preparation import Preparation
from services.worker.engines.mock.sequence import Sequence as Running

MOST_PIXELS = 1 << 26
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
SAMPLE = 64  # pixels on each side of the sample that determines the colour
MOST_KEPT = 4_096


class Describer(Preparation):
    """Describes the items of sequences before they are queued.

    Args:
        proceed: Continues with a sequence and the description of its items; may raise SluiceError.
        tasks: Owns the tasks.
        threads: Number of threads.
        max_waiting: Maximum number of sequences; more are rejected.
    """

    def __init__(
        self, proceed: Callable[[Running, str], None], tasks: TaskOwner, threads: int, max_waiting: int
    ) -> None:
        super().__init__("media", "pictures", tasks, max_waiting)
        self._proceed = proceed
        self._pool = ThreadPoolExecutor(threads, "mock-media")
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, sequence: Running) -> None:
        self._proceed(sequence, "; ".join([await self._description(item) for item in sequence.request.media]))

    async def _description(self, item: MediaItem) -> str:
        if (known := self._known.get(item.file.hash)) is not None:
            self._known.move_to_end(item.file.hash)
            return known
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._pool, describe, item.span.kind, item.file)
        self._known[item.file.hash] = text
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return text


def describe(kind: MediaKind, file: MediaFile) -> str:
    """Returns such as "image 64x48 #ff0000 0123abcd": size, most frequent colour, and the beginning of the hash.

    Raises:
        SluiceError: INVALID_ARGUMENT for a picture that cannot be decoded or has too many pixels.
    """
    name = file.hash[:4].hex()
    if kind is not MediaKind.IMAGE:
        return f"{kind.capability} {len(file.data)} bytes {name}"
    from PIL import Image

    try:
        with Image.open(io.BytesIO(file.data)) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise _bad(f"has {picture.width} x {picture.height} pixels; send at most {MOST_PIXELS}")
            width, height = picture.size
            if picture.getexif().get(_ORIENTATION) in _SIDEWAYS:
                width, height = height, width
            picture.draft("RGB", (SAMPLE, SAMPLE))  # JPEG files are decoded at a smaller size
            whole = picture.convert("RGB")
    except SluiceError:
        raise
    except Exception as error:  # decoders raise many types for broken files
        raise _bad("cannot be decoded; send a complete PNG, JPEG, WebP or GIF file") from error
    sample = whole.resize((min(whole.width, SAMPLE), min(whole.height, SAMPLE)), Image.Resampling.NEAREST)
    colours: Sequence[tuple[int, tuple[int, ...]]] = sample.getcolors(SAMPLE * SAMPLE)  # type: ignore[assignment]
    _, (red, green, blue) = max(colours)
    return f"image {width}x{height} #{red:02x}{green:02x}{blue:02x} {name}"


def _bad(what: str) -> SluiceError:
    return invalid(f"A picture {what}.", param="media", code="invalid_media")
