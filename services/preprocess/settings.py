"""Settings of the preprocess service."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from services.common.discovery.processing_settings import ProcessingSettings
from services.common.packages.extensions import MEDIA, problem_of
from services.common.packages.model_files import DEFAULT_NAME, DEFAULT_SOURCE
from services.common.settings.service import CommaList, GrpcServiceSettings, settings_config
from services.common.types.media.parts import MediaLimits
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.media.addresses import AllowedHosts, PublicAddresses
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import HttpsGet
from services.preprocess.media.limits import CheckLimits
from services.preprocess.media.loading import MediaLoader
from services.preprocess.tokenizers.engine_extensions import EngineOptions

log = logging.getLogger(__name__)

READ_SHARE = 5 / 8
"""Share of the time for a media file that connecting to its host, or a pause between two of its pieces, may take."""


class PreprocessSettings(ProcessingSettings, GrpcServiceSettings):
    """Turns requests into token ids.

    Every flag is also an environment variable: --log-level is SLUICE_PREPROCESS_LOG_LEVEL.
    """

    model_config = settings_config("preprocess")
    max_message_mb: ClassVar[int] = 64  # media files

    models: CommaList = Field(
        [f"{DEFAULT_NAME}={DEFAULT_SOURCE}"],
        description="models to serve, each NAME=SOURCE[@PROCESSOR]; SOURCE is a folder, hub id or mistral-common:NAME; "
        "may be empty with routers",
    )
    chat_templates: CommaList = Field([], description="chat templates that replace the models' own, each as NAME=FILE")
    tokenize_threads: int = Field(2, ge=1, le=64, description="threads for requests larger than 4 KiB")
    max_prompt_mb: float = Field(4.0, gt=0, description="maximum size of a prompt, before and after the template, MiB")
    cache_mb: int = Field(64, ge=0, description="cache for ids of prompt segments, MiB per model; 0: no cache")

    media_hosts: CommaList = Field(
        [],
        description="hosts that media files are fetched from over https, each HOST or *.DOMAIN, with :PORT unless 443; "
        "* for all; empty: none",
    )
    media_mb: float = Field(20.0, gt=0, le=512, description="maximum size of a media file, MiB")
    media_fetch_s: float = Field(
        8.0,
        gt=0,
        description="maximum seconds of fetching a media file, with redirects; at most the gateway's "
        "tokenize-timeout-s minus 6, so that clients get the reason",
    )

    engine_processes: int = Field(1, ge=1, le=64, description="number of engine tokenizer processes per model")

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = [spec.name for spec in self.configured]
        if not names and not self.routers and not self.workers:
            raise ValueError("--models is empty; set at least one model, or routers from which they are discovered")
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models lists {', '.join(duplicates)} more than once")
        return self

    @model_validator(mode="after")
    def _check_chat_templates(self) -> Self:
        for text in self.chat_templates:
            name, _, file = text.partition("=")
            if not file or name not in {spec.name for spec in self.served}:
                raise ValueError(f"chat template {text!r} is not NAME=FILE with the name of a served model")
        return self

    @model_validator(mode="after")
    def _check_media_hosts(self) -> Self:
        AllowedHosts(self.media_hosts)
        return self

    def media_loader(self) -> MediaLoader:
        """Returns a new loader of media items with these limits; belongs to the running event loop."""
        most = int(self.media_mb * (1 << 20))
        get = HttpsGet(PublicAddresses(), most, READ_SHARE * self.media_fetch_s)
        fetch_limits = FetchLimits(most, self.media_fetch_s)
        check_limits = CheckLimits()
        if no_clips := problem_of(MEDIA, CLIPS):
            log.warning("audio and videos are refused: %s", no_clips)
        return MediaLoader(
            MediaFetcher(AllowedHosts(self.media_hosts), get, fetch_limits),
            MediaChecker(check_limits),
            None if no_clips else MediaChecker(check_limits, CLIPS),
            MediaLimits(item_bytes=most),
            self.media_fetch_s + check_limits.limit_s,
            no_clips,
        )

    def template_file(self, model: str) -> Path | None:
        """Returns the chat template file configured for a model; None for the model's own template."""
        given = dict(text.split("=", 1) for text in self.chat_templates)
        return Path(given[model]) if model in given else None

    @property
    def engines(self) -> dict[str, EngineOptions]:
        """Options of the processes, by engine."""
        return {
            engine: EngineOptions(python, self.engine_processes)
            for engine, python in (("vllm", self.vllm_python), ("sglang", self.sglang_python))
        }

    @property
    def encoder_options(self) -> EncoderOptions:
        """Optimizations of the tokenizers."""
        return EncoderOptions(cache_bytes=self.cache_mb << 20)

    @property
    def max_prompt_bytes(self) -> int:
        """`max_prompt_mb` in bytes."""
        return int(self.max_prompt_mb * (1 << 20))
