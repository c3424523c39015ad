"""Settings of the preprocess service."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.common.discovery.processing_settings import ProcessingSettings
from services.common.media.parts import MediaLimits
from services.common.models import DEFAULT_NAME, DEFAULT_SOURCE
from services.common.settings import CommaList, GrpcServiceSettings, settings_config
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.media.addresses import AllowedHosts, PublicAddresses
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import HttpsGet
from services.preprocess.media.limits import CheckLimits, ClipLimits, ImageLimits
from services.preprocess.media.loading import MediaLoader
from services.preprocess.tokenizers.engine import EngineOptions


class PreprocessSettings(ProcessingSettings, GrpcServiceSettings):
    """Turns requests into token ids.

    Every flag is also an environment variable: --log-level is SLUICE_PREPROCESS_LOG_LEVEL.
    """

    model_config = settings_config("preprocess")

    models: CommaList = Field(
        [f"{DEFAULT_NAME}={DEFAULT_SOURCE}"],
        description="models to serve, each NAME=SOURCE[@PROCESSOR]; SOURCE is a folder, hub id or mistral-common:NAME; "
        "may be empty with routers",
    )
    chat_templates: CommaList = Field([], description="chat templates that replace the models' own, each as NAME=FILE")
    preload: bool = Field(True, description="load all tokenizers before accepting requests; no: on first use")
    load_wait_s: float = Field(60.0, gt=0, description="maximum seconds a request waits for its tokenizer to load")
    tokenize_threads: int = Field(2, ge=1, le=64, description="threads for requests larger than inline-kb")
    inline_kb: int = Field(
        4,
        ge=0,
        description="requests up to this many KiB run on the event loop, where they cost less than a thread switch",
    )
    max_waiting: int = Field(
        1024, ge=1, description="maximum number of requests waiting for a thread; further ones are rejected"
    )
    work_limit_s: float = Field(10.0, gt=0, description="maximum seconds a request may wait and run")
    max_prompt_mb: float = Field(4.0, gt=0, description="maximum size of a prompt, before and after the template, MiB")
    fast_tokenizers: bool = Field(
        True, description="use a faster library where installed and a self-check confirms equal ids"
    )
    cache_mb: int = Field(64, ge=0, description="cache for ids of prompt segments, MiB per model; 0: no cache")
    template_limit_s: float = Field(2.0, gt=0, description="maximum seconds a chat template may run")
    template_processes: int = Field(
        1, ge=1, le=16, description="number of processes that run templates sent by clients"
    )
    worker_template_processes: int = Field(
        16,
        ge=1,
        le=1024,
        description="maximum number of processes that run templates of models discovered from workers, one per model",
    )
    template_memory_mb: int = Field(512, ge=128, description="address space limit of a template process, MiB")
    trust_worker_templates: bool = Field(
        False,
        description="run templates of models discovered from workers in this process, where a hostile one can exhaust "
        "memory and CPU",
    )

    max_message_mb: int = Field(64, ge=1, le=1024, description="maximum size of a gRPC message, MiB")
    media_hosts: CommaList = Field(
        [],
        description="hosts that media files are fetched from over https, each HOST or *.DOMAIN, with :PORT unless 443; "
        "* for all; empty: none",
    )
    media_items: int = Field(MediaLimits().items, ge=1, le=1024, description="maximum number of media items of a chat")
    media_mb: float = Field(20.0, gt=0, le=512, description="maximum size of a media file, MiB")
    media_total_mb: int = Field(
        MediaLimits().total_bytes >> 20,
        ge=1,
        le=56,
        description="maximum size of all media files of a chat together, fetched ones included, MiB",
    )
    media_pixels: int = Field(40_000_000, ge=1, le=1 << 30, description="maximum number of pixels of an image")
    media_side: int = Field(16_384, ge=1, le=1 << 20, description="maximum number of pixels of a side of an image")
    media_frames: int = Field(256, ge=1, description="maximum number of frames of an image; only the first is used")
    media_seconds: int = Field(
        ClipLimits().seconds, ge=1, le=86_400, description="maximum length of audio and of a video, seconds"
    )
    media_video_pixels: int = Field(
        ClipLimits().pixels, ge=1, le=1 << 26, description="maximum number of pixels of a frame of a video"
    )
    media_video_frames: int = Field(ClipLimits().frames, ge=1, description="maximum number of frames of a video")
    media_processes: int = Field(
        1, ge=1, le=16, description="number of processes that decode images, and of others for audio and videos"
    )
    media_memory_mb: int = Field(768, ge=128, description="address space limit of a media process, MiB")
    media_limit_s: float = Field(5.0, gt=0, description="maximum seconds of decoding a media file")
    media_fetch_s: float = Field(
        8.0,
        gt=0,
        description="maximum seconds of fetching a media file, with redirects; together with media-limit-s less than "
        "the gateway's tokenize-timeout-s, so that clients get the reason",
    )
    media_read_s: float = Field(
        5.0, gt=0, description="maximum seconds of connecting to a media host, and between two pieces of a file"
    )
    media_fetches: int = Field(16, ge=1, le=256, description="maximum number of media files fetched at once")

    engine_processes: int = Field(1, ge=1, le=64, description="number of engine tokenizer processes per model")
    engine_memory_mb: int = Field(
        2048, ge=128, description="memory limit of an engine tokenizer process beyond its tokenizer, MiB"
    )
    engine_start_s: float = Field(
        120.0, gt=0, description="maximum seconds an engine tokenizer process may take to start"
    )

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
        get = HttpsGet(PublicAddresses(), most, self.media_read_s)
        fetch_limits = FetchLimits(most, self.media_fetch_s, self.media_fetches)
        images = ImageLimits(self.media_pixels, self.media_side, self.media_frames)
        clips = ClipLimits(self.media_seconds, self.media_video_pixels, self.media_video_frames)
        check_limits = CheckLimits(images, clips, self.media_limit_s, self.media_memory_mb, self.media_processes)
        return MediaLoader(
            MediaFetcher(AllowedHosts(self.media_hosts), get, fetch_limits),
            MediaChecker(check_limits),
            MediaChecker(check_limits, CLIPS),
            MediaLimits(self.media_items, most, self.media_total_mb << 20),
            self.media_fetch_s + self.media_limit_s,
        )

    def template_file(self, model: str) -> Path | None:
        """Returns the chat template file configured for a model; None for the model's own template."""
        given = dict(text.split("=", 1) for text in self.chat_templates)
        return Path(given[model]) if model in given else None

    @property
    def engines(self) -> dict[str, EngineOptions]:
        """Options of the processes, by engine."""
        return {
            engine: EngineOptions(
                python,
                self.engine_processes,
                self.work_limit_s,
                self.template_limit_s,
                self.engine_start_s,
                self.engine_memory_mb,
            )
            for engine, python in (("vllm", self.vllm_python), ("sglang", self.sglang_python))
        }

    @property
    def encoder_options(self) -> EncoderOptions:
        """Optimizations of the tokenizers."""
        return EncoderOptions(self.fast_tokenizers, self.cache_mb << 20)

    @property
    def max_prompt_bytes(self) -> int:
        """`max_prompt_mb` in bytes."""
        return int(self.max_prompt_mb * (1 << 20))
