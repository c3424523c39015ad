"""Tokenizers in Hugging Face's format: tokenizer.json plus a Jinja chat template."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.base.errors import SluiceError, invalid
from services.common.base.packing import pack_u32, unpack_u32
from services.common.packages.model_files import fingerprint, read_json
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.generation_defaults import eos_ids, generation_defaults
from services.preprocess.contract.tokenizer import (
    HINTS,
    CacheStats,
    ChatRequest,
    ChatTokenizer,
    MediaRule,
    MediaRules,
    Message,
    PendingPrompt,
    TokenizerFacts,
)
from services.preprocess.contract.validation import MEDIA_PARTS
from services.preprocess.encoders.backend import EncoderOptions
from services.preprocess.encoders.hf import HfEncoder
from services.preprocess.limits import Limits
from services.preprocess.media.rules import ModelFiles, media_rules
from services.preprocess.templates.learned import learned
from services.preprocess.templates.runner import InThisProcess, TemplateRunner
from services.preprocess.tokenizers.engine_extensions import EngineOptions, NoImages, has_processor, processor_rule
from services.preprocess.tokenizers.placeholders import Placeholders

log = logging.getLogger(__name__)

_END_MARK = "\ue000sluice-open-end\ue001 "
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)
_UNSET_LENGTH = 10**9  # transformers writes a huge number for an unknown length
MAX_SPECIAL_CHARS = 1_024
"""Characters of a special token that the template of every chat gets; longer ones are left out."""
MAX_TEMPLATES = 64
"""Chat templates of a model; a model with more is not loaded."""


class HfTokenizer(ChatTokenizer):
    """A tokenizer.json with the files beside it.

    Args:
        path: a model folder or a tokenizer.json.
        limits: limits of templates; clients' templates run in processes that can be killed.
        encoder_options: which optimizations to use.
        chat_template: replaces the model's own; empty to keep that one.
        own: runs the model's own templates; None for this process.
        processors: run the processors of models without a built-in rule of images; empty: those take no images.

    Attributes:
        no_images: why images are not taken, as a sentence; may be empty.
    """

    def __init__(
        self,
        path: Path,
        limits: Limits,
        encoder_options: EncoderOptions | None = None,
        chat_template: str = "",
        own: TemplateRunner | None = None,
        processors: Sequence[EngineOptions] = (),
    ) -> None:
        self._own = own or InThisProcess(limits.template_s, limits.max_prompt_chars)
        self._clients = limits.foreign_templates.clients
        self.renders_apart = self._own.apart
        file = path if path.is_file() else path / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file))
        # Files may contain training settings; a prompt is neither truncated nor padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = read_json(path, "tokenizer_config.json")
        model = read_json(path, "config.json")
        generation = read_json(path, "generation_config.json")
        self._special = _special_tokens({**read_json(path, "special_tokens_map.json"), **config})
        self._templates = _own_templates(path, config)
        if chat_template:
            self._templates = {"default": chat_template}
        if len(self._templates) > MAX_TEMPLATES:
            raise invalid(f"The model has more than {MAX_TEMPLATES} chat templates; remove some.", param="model")
        for source in self._templates.values():
            self._own.compile(source)
        self._shows = {
            source: learned(limits.foreign_templates, source, self._special) for source in self._templates.values()
        }
        self._encoder = HfEncoder(file, self._tokenizer, self._probe(), encoder_options or EncoderOptions())
        self._placeholders: Placeholders | None = None
        self.facts = TokenizerFacts(
            processor="hf",
            fingerprint=fingerprint(path),
            vocab_size=max(_vocab_size(self._tokenizer), _number(model, ("vocab_size",))),
            eos_ids=self._eos_ids(generation, model),
            context_length=_context_length(model, config),
            has_chat_template=bool(self._templates),
            template_fingerprint=_digest(self._templates),
            backend=self._encoder.backend,
            defaults=generation_defaults(generation),
            cache_refusal=self._encoder.cache_refusal,
            without_effect=frozenset(name for name in HINTS if not _is_read(name, self._templates.values())),
            template=self._shows[default].as_json() if (default := self._templates.get("default", "")) else {},
        )
        # Last, because it may start a process.
        self.no_images = ""
        self.media_rules = self._own_rules(path, processors)
        self._placeholders = self._own_placeholders(file)
        self.media_rules = {kind: rule for kind, rule in self.media_rules.items() if self._writes(kind, rule)}

    def _own_rules(self, path: Path, processors: Sequence[EngineOptions]) -> MediaRules:
        """Returns the rules of the model's files, or else that of its processor of images; empty without media."""
        files = ModelFiles.read(path)
        rules = media_rules(files)
        if rules or not processors or not self._templates or not has_processor(files):
            return rules
        try:
            return {MediaKind.IMAGE: processor_rule(path, self.render, self._tokenizer.token_to_id, processors)}
        except (NoImages, SluiceError) as error:
            self.no_images = str(error)
            log.warning("this model takes no images", extra={"reason": self.no_images})
            return {}

    def _own_placeholders(self, file: Path) -> Placeholders | None:
        """Returns the placeholders of media items; without them, the model takes none."""
        if not self.media_rules:
            return None
        try:
            return Placeholders([rule.token_id for rule in self.media_rules.values()], file.read_bytes())
        except (ValueError, KeyError, TypeError) as error:
            log.warning("media items are not supported by this tokenizer", extra={"reason": str(error)})
            self._close_rules()
            self.media_rules = {}
            return None

    def _writes(self, kind: MediaKind, rule: MediaRule) -> bool:
        """Returns whether the model's template writes the placeholder of a kind; older ones only write images."""
        if kind is MediaKind.IMAGE or not self._templates:
            return True
        part = {"type": kind.capability, "media": 0}
        try:
            return self.encode_chat(ChatRequest([{"role": "user", "content": [part]}])).count(rule.token_id) == 1
        except SluiceError:
            return False

    def _close_rules(self) -> None:
        for rule in self.media_rules.values():
            rule.close()

    def _eos_ids(self, generation: dict[str, Any], model: dict[str, Any]) -> tuple[int, ...]:
        own = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        return eos_ids(own, generation.get("eos_token_id", model.get("eos_token_id")))

    def _probe(self) -> str:
        """Returns a short conversation as rendered by the model's template; the template itself if it rejects that."""
        try:
            return self.render(ChatRequest([dict(message) for message in _PROBE]))
        except SluiceError:
            return "".join(self._templates.values())

    @property
    def cache_stats(self) -> CacheStats | None:
        return self._encoder.cache_stats

    def pack_chat(self, chat: ChatRequest) -> bytes:
        """Returns packed ids of a chat; the template emits BOS itself, so none is added."""
        hidden = self._placeholders.hidden(chat) if self._placeholders is not None else chat
        text = self._rendered(chat, hidden)
        return self._pack_hidden(text) if hidden is not chat else self.pack_text(text, add_special_tokens=False)

    def _pack_hidden(self, text: str) -> bytes:
        """Returns packed ids of a rendered chat whose text contained placeholders, which stay text."""
        assert self._placeholders is not None
        try:
            return self._placeholders.packed(self._placeholders.restored(text))
        except (TypeError, ValueError) as error:
            raise invalid("The prompt cannot be tokenized; send valid Unicode.") from error

    def pack_text(self, text: str, add_special_tokens: bool | None = None) -> bytes:
        try:
            return self._encoder.encode(text, add_special_tokens is not False)
        except (TypeError, ValueError) as error:
            raise invalid("The prompt cannot be tokenized; send valid Unicode.") from error

    def pack_pair(self, first: str, second: str, add_special_tokens: bool | None = None) -> tuple[bytes, int]:
        """See `TokenizerProtocol`; special tokens between the texts belong to the first one."""
        try:
            encoding = self._tokenizer.encode(first, second, add_special_tokens=add_special_tokens is not False)
        except (TypeError, ValueError) as error:
            raise invalid("The texts cannot be tokenized; send valid Unicode.") from error
        if 1 not in encoding.sequence_ids:
            raise invalid("The second text has no tokens; send a longer one.")
        return pack_u32(encoding.ids), encoding.sequence_ids.index(1)

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        return unpack_u32(self.pack_chat(chat)).tolist()

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return unpack_u32(self.pack_text(text, add_special_tokens)).tolist()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def render(self, chat: ChatRequest) -> str:
        return self._rendered(chat, chat)

    def _rendered(self, chat: ChatRequest, hidden: ChatRequest) -> str:
        runner, source = self._template(chat)
        text, notes = runner.render(source, self._variables(hidden), self._shows.get(source))
        chat.notes.extend(notes)
        return _finished(chat, text)

    def begin_chat(self, chat: ChatRequest) -> PendingPrompt | None:
        runner, source = self._template(chat)
        if not runner.apart:
            return None
        places = self._placeholders
        hidden = places.hidden(chat) if places is not None else chat
        rendered = runner.prepare(source, self._variables(hidden), self._shows.get(source))

        async def render() -> str:
            text, notes = await rendered()
            chat.notes.extend(notes)
            return text

        pack, shown = (self._pack_hidden, places.shown) if places is not None and hidden is not chat else (None, None)
        return PendingPrompt(render, lambda text: _finished(chat, text), pack, shown, chat.notes)

    def close(self) -> None:
        """Ends the processes of the model's templates and processor, if any."""
        self._own.close()
        self._close_rules()

    def _variables(self, chat: ChatRequest) -> dict[str, Any]:
        continued = chat.continue_final_message
        generation_prompt = chat.add_generation_prompt
        messages = chat.messages
        if continued:
            messages = [*messages[:-1], _with_end_mark(messages[-1])]
        return {
            **self._special,
            **chat.template_kwargs,
            "messages": messages,
            "tools": chat.prompt_tools,
            "documents": chat.documents,
            "add_generation_prompt": (not continued) if generation_prompt is None else generation_prompt,
        }

    def _template(self, chat: ChatRequest) -> tuple[TemplateRunner, str]:
        """Returns the runner and the template for this chat."""
        own = self._own_template(chat)
        return (self._own, own) if own else (self._clients, chat.chat_template)

    def _own_template(self, chat: ChatRequest) -> str:
        """Returns the model's template for this chat; empty when the request has its own."""
        own = self._templates
        if chat.chat_template:
            return own.get(chat.chat_template, "")
        source = own.get("tool_use") if chat.prompt_tools else None
        source = source or own.get("default")
        if source:
            return source
        if own:
            raise invalid(
                f"The model has several chat templates and no default; set chat_template to one of {', '.join(own)}.",
                param="chat_template",
            )
        raise no_chat_template()


def no_chat_template() -> SluiceError:
    """Returns the error of a chat for a model without a template."""
    return invalid(
        "The model has no chat template; send a plain prompt, or a chat_template with the request.",
        param="messages",
        code="no_chat_template",
    )


def _with_end_mark(message: Message) -> Message:
    """Returns the message with a mark at its end, at which the rendered text is cut."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}
    *before, last = content
    if last["type"] in MEDIA_PARTS:
        raise invalid(
            "A message that ends with a media item cannot be continued; unset continue_final_message.",
            param="continue_final_message",
        )
    kind = last["type"]
    return {**message, "content": [*before, {**last, kind: last[kind] + _END_MARK}]}


def _finished(chat: ChatRequest, text: str) -> str:
    return _cut_at_mark(text) if chat.continue_final_message else text


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK.rstrip())
    if at < 0:
        raise invalid(
            "continue_final_message is set, but the chat template omits the final message; unset it.",
            param="continue_final_message",
        )
    prompt = text[:at]
    # A template that trims content would also have trimmed the message's own trailing space.
    return prompt if text.startswith(_END_MARK, at) else prompt.rstrip()


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and len(text) <= MAX_SPECIAL_CHARS:  # passed to the template of every chat
            tokens[name] = text
    return tokens


def _is_read(name: str, templates: Iterable[str]) -> bool:
    """Returns whether a template may read the variable; a word of its text with this name counts, too."""
    return any(re.search(rf"\b{name}\b", source) for source in templates)


def _own_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns templates by name, a single one as "default". Template files take precedence over the configuration."""
    declared = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(declared, str) and declared:
        templates["default"] = declared
    elif isinstance(declared, list):
        templates = {
            item["name"]: item["template"]
            for item in declared
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        }
    folder = path.parent if path.is_file() else path
    for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[extra.stem] = extra.read_text("utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text("utf-8")
    return templates


def _digest(own: dict[str, str]) -> str:
    if not own:
        return ""
    content = own["default"] if list(own) == ["default"] else json.dumps(own, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _number(config: dict[str, Any], names: Sequence[str]) -> int:
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, dict) else {}):
        for name in names:
            value = source.get(name)
            if isinstance(value, int | float) and 0 < value < _UNSET_LENGTH:
                return int(value)
    return 0


def _context_length(model: dict[str, Any], config: dict[str, Any]) -> int:
    lengths = (_number(model, _CONTEXT_NAMES), _number(config, ("model_max_length",)))
    return min((length for length in lengths if length), default=0)
