"""Starts the engine: loads the model and allocates its cache, off the event loop; imports torch lazily."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.packages import model_files as models
from services.worker.contract.capabilities import USUAL_SAMPLING, Capability
from services.worker.contract.engine import EngineConfig
from services.worker.contract.generation import GenerateRequest, PositionLogprobs, Role
from services.worker.engines.inprocess.card import labels_of
from services.worker.engines.transformers import guidance
from services.worker.engines.transformers.folder import DTYPE_BYTES, ModelFolder, read_folder
from services.worker.engines.transformers.options import Options
from services.worker.engines.transformers.runner import StepRunner
from services.worker.engines.transformers.sampling import History, SamplingPlan
from services.worker.engines.transformers.sizing import Plan, Shape, fit
from services.worker.engines.transformers.step import Listener
from services.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from services.worker.engines.transformers.batch_request import Pictures
    from services.worker.engines.transformers.guidance import Constraint, Grammars
    from services.worker.engines.transformers.lora import Adapters
    from services.worker.engines.transformers.vision import VisionModel

DEFAULT_BLOCKS = 2_048
DEFAULT_BATCH = 512
DEFAULT_SEQUENCES = 256
DEFAULT_VISION_SEQUENCES = 16
CAPABILITIES: frozenset[Capability] = (
    USUAL_SAMPLING
    | guidance.KINDS
    | {
        Capability.ALLOWED_TOKEN_IDS,
        Capability.BAD_WORDS,
        Capability.TOKEN_IDS,
        Capability.LOGPROBS,
        Capability.PROMPT_LOGPROBS,
        Capability.PRIORITY,
        Capability.CACHE_SALT,
        Capability.LORA,
        Capability.LORA_LOADING,
        Capability.EMBEDDINGS,
        Capability.KV_EVENTS,
        Capability.CLEAR_CACHE,
        Capability.IMAGE,
    }
)
_TEXT_ONLY = frozenset(
    {
        Capability.EMBEDDINGS,
        Capability.LORA,
        Capability.LORA_LOADING,
        Capability.PRIORITY,
        Capability.PROMPT_LOGPROBS,
    }
)
"""What models with a vision part are served without."""


@dataclass(frozen=True, slots=True)
class Started:
    """The components of a started engine; `vision` is None for models without a vision part."""

    config: EngineConfig
    folder: ModelFolder
    model: Any
    runner: StepRunner
    adapters: Adapters
    grammars: Grammars | None
    pooling: str
    vision: VisionModel | None = None

    def add(
        self,
        key: str,
        request: GenerateRequest,
        plan: SamplingPlan,
        constraint: Constraint | None,
        seed: int,
        limit: int,
        pictures: Pictures | None = None,
    ) -> bool:
        """Queues a request; returns False when the engine has stopped."""
        from services.worker.engines.transformers.batch_request import BatchRequest
        from services.worker.engines.transformers.sampler import TokenSampler

        token_ids = request.token_ids.tolist()
        sampler = TokenSampler(plan, History(token_ids, request.resumed_tokens), constraint, self.model.device)
        batch_request = BatchRequest(sampler, seed, request.lora, request.priority, pictures)
        return self.runner.add(key, batch_request, token_ids, limit)

    def check_media(self, request: GenerateRequest) -> None:
        """Raises SluiceError(INVALID_ARGUMENT) when placeholder tokens and media items do not belong together."""
        if self.vision is not None:
            self.vision.check(request)

    def encode(self, request: GenerateRequest) -> Pictures:
        """Decodes and encodes the pictures of a request, which is slow; raises SluiceError if that fails."""
        if self.vision is None:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, "This model takes no media items; send text only.")
        return self.vision.encode(request)

    def constraint(self, request: GenerateRequest) -> Constraint:
        """Compiles a request's grammar, which is slow; raises SluiceError(INVALID_ARGUMENT) for an invalid grammar."""
        if self.grammars is None or request.guided is None:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "llguidance is not installed in this worker; install it to use response_format.",
            )
        resumed = request.token_ids[len(request.token_ids) - request.resumed_tokens :]
        return self.grammars.constraint(request.guided, resumed.tolist())

    def score(self, request: GenerateRequest) -> list[PositionLogprobs]:
        """Returns the log-probabilities of a prompt; slow. Raises SluiceError(INVALID_ARGUMENT) if it is too long."""
        from services.worker.engines.transformers.scoring import score_prompt

        return score_prompt(self.model, request.token_ids, request.prompt_logprobs or 0, self.adapters, request.lora)

    def load_adapter(self, name: str, path: str) -> None:
        """Loads an adapter between two steps, which is slow; raises SluiceError(INVALID_ARGUMENT) if incompatible."""
        with self.runner.pause():
            self.adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Removes an unused adapter and clears the prefix cache, because another adapter may reuse its name."""
        self.adapters.unload(name)
        self.runner.forget_prefixes()


def start_engine(settings: WorkerSettings, options: Options, listener: Listener) -> Started:
    """Loads the model and allocates its cache.

    Args:
        settings: The worker's settings.
        options: The engine's options.
        listener: Callbacks for start phases and, later, for steps.

    Raises:
        SluiceError: When a package or file is missing, an option is invalid, or memory is insufficient.
    """
    listener.on_phase("reading the model's files")
    folder = read_folder(settings.spec.source)
    adapter_folders = _adapter_folders(settings)
    listener.on_phase("importing torch and transformers")
    require_library()
    from services.worker.engines.transformers import batching, loading
    from services.worker.engines.transformers.lora import Adapters

    if labels_of(folder.config):
        raise invalid(
            f"The model at {folder.path} classifies texts; serve it with --engine transformers-classifier.",
            param="model",
        )
    device = loading.device_of(options)
    listener.on_phase("loading weights")
    if folder.takes_images:
        return _start_vision(settings, options, folder, listener)
    model = loading.load_model(folder, options, device)
    adapters = Adapters(model)
    for name, path in adapter_folders.items():
        listener.on_phase(f"loading adapter {name}")
        adapters.load(name, path)
    listener.on_phase("allocating the cache")
    shape = Shape.of(folder.config, DTYPE_BYTES[loading.dtype_of(folder, options)], not _flash(options))
    plan = _plan(settings, shape, DEFAULT_SEQUENCES, int(loading.free_memory_on(device) * options.memory_share))
    batcher = batching.Batcher(model, plan, adapters, options.prefix_cache, listener)
    try:
        batcher.prepare()
    except (MemoryError, RuntimeError) as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Not enough memory for a cache of {plan.total_blocks} blocks; lower --total-blocks.",
            code="not_enough_memory",
        ) from error
    grammars = _grammars(folder, options)
    pooling = options.pooling or folder.pooling
    config = _config(settings, folder, plan, batcher, grammars is not None, bool(pooling), loading.VERSION)
    return Started(config, folder, model, batcher, adapters, grammars, pooling)


def _start_vision(settings: WorkerSettings, options: Options, folder: ModelFolder, listener: Listener) -> Started:
    """Loads a model with a vision part, whose requests run in single steps."""
    from services.worker.engines.transformers import loading
    from services.worker.engines.transformers.lora import Adapters
    from services.worker.engines.transformers.stepping import Stepper
    from services.worker.engines.transformers.vision import VisionModel, load_processor

    if settings.adapters:
        raise invalid("The transformers engine has no adapters for models with a vision part.", param="adapters")
    device = loading.device_of(options)
    processor = load_processor(folder)
    model = loading.load_model(folder, options, device, "images")
    vision = VisionModel(model, processor)
    shape = Shape.of(folder.config, DTYPE_BYTES[loading.dtype_of(folder, options)], masks=False)
    room = int(loading.free_memory_on(device) * options.memory_share)
    plan = _plan(settings, shape, DEFAULT_VISION_SEQUENCES, room)
    stepper = Stepper(vision.begin, plan, listener)
    grammars = _grammars(folder, options)
    config = _config(settings, folder, plan, stepper, grammars is not None, False, loading.VERSION)
    return Started(config, folder, model, stepper, Adapters(model), grammars, "", vision)


def _config(
    settings: WorkerSettings,
    folder: ModelFolder,
    plan: Plan,
    runner: StepRunner,
    has_grammars: bool,
    has_embeddings: bool,
    version: str,
) -> EngineConfig:
    capabilities = set(CAPABILITIES)
    if not has_grammars:
        capabilities -= guidance.KINDS
    if not has_embeddings:
        capabilities.discard(Capability.EMBEDDINGS)
    if not runner.shares_prefixes:
        capabilities -= {Capability.KV_EVENTS, Capability.CLEAR_CACHE}
    capabilities -= _TEXT_ONLY if folder.takes_images else {Capability.IMAGE}
    declared = settings.context_length or folder.context_length
    return EngineConfig(
        model=settings.spec.name,
        source=settings.spec.source,
        processor=settings.spec.processor or models.detect_processor(folder.path),
        fingerprint=models.fingerprint(folder.path),
        # A sequence cannot be longer than the whole cache.
        context_length=min(declared, runner.cache_tokens),
        vocab_size=folder.vocab_size,
        block_size=plan.block_size if runner.shares_prefixes else 0,
        total_blocks=plan.total_blocks,
        max_sequences=plan.max_sequences,
        max_batched_tokens=plan.max_batched_tokens,
        eos_token_ids=folder.eos_token_ids,
        capabilities=frozenset(str(capability) for capability in capabilities),
        adapters=tuple(_adapter_folders(settings)),
        role=Role.AGGREGATED,
        engine="transformers",
        engine_version=version,
        chat_template=settings.spec.chat_template,
    )


def _plan(settings: WorkerSettings, shape: Shape, sequences: int, room: int) -> Plan:
    """Returns the configured sizes that fit into memory; sizes that are not set start from lower defaults."""
    fixed = frozenset(settings.model_fields_set)

    def size(name: str, default: int) -> int:
        value: int = getattr(settings, name)
        return value if name in fixed else min(value, default)

    wanted = Plan(
        block_size=settings.block_size,
        total_blocks=size("total_blocks", DEFAULT_BLOCKS),
        max_batched_tokens=size("max_batched_tokens", DEFAULT_BATCH),
        max_sequences=size("max_sequences", sequences),
    )
    if wanted.block_size < 4:
        raise invalid("The transformers engine needs a --block-size of at least 4.", param="block_size")
    return fit(wanted, fixed, shape, room)


def _adapter_folders(settings: WorkerSettings) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for adapter in settings.adapters:
        name, _, path = adapter.partition("=")
        if not name or not path:
            raise invalid(f"Adapter {adapter!r} has no name or folder; use NAME=FOLDER.", param="adapters")
        folders[name] = Path(path).expanduser()
    return folders


def _grammars(folder: ModelFolder, options: Options) -> Grammars | None:
    file = folder.path / "tokenizer.json"
    if not guidance.available() or not file.is_file() or not folder.eos_token_ids:
        return None
    tokenizer = file.read_text("utf-8")
    return guidance.Grammars(tokenizer, folder.vocab_size, folder.eos_token_ids, options.grammar_limits)


def _flash(options: Options) -> bool:
    return options.attention.startswith("flash")


def require_library() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"The transformers engine requires {error.name}: pip install 'sluice-llm[transformers]'.",
        ) from error
