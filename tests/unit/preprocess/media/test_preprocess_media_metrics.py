"""Metrics of media files: what was fetched, checked, known and rejected."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.common.base.errors import SluiceError
from services.common.types.media.parts import MediaInput, MediaLimits
from services.common.types.media.spans import MediaKind
from services.preprocess.media.addresses import AllowedHosts, PublicAddresses
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import HttpsGet
from services.preprocess.media.loading import MediaLoader
from tests.support.data.images import image_file


@pytest.fixture
async def loader() -> AsyncIterator[MediaLoader]:
    get = HttpsGet(PublicAddresses(), 1000, 5.0)
    loader = MediaLoader(
        MediaFetcher(AllowedHosts(["a.test"]), get, FetchLimits()),
        MediaChecker(),
        MediaChecker(group=CLIPS),
        MediaLimits(),
    )
    yield loader
    await loader.close()


async def test_loader_counts_refused_fetches_checks_and_known_files(loader: MediaLoader) -> None:
    file = MediaInput("messages[0].content[0]", MediaKind.IMAGE, image_file(8, 8))
    await loader.load([file])
    await loader.load([file])
    with pytest.raises(SluiceError):
        await loader.load([MediaInput("messages[0].content[0]", MediaKind.IMAGE, url="https://b.test/")])
    assert (loader.checker.counts.checked, loader.checker.counts.known) == (1, 1)
    assert loader.checker.counts.seconds > 0
    assert loader.fetcher.counts.results == {"media_fetch_refused": 1}
