"""Files that stand for the Python interpreter of another environment, in which engines or transformers would run."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.repository import ROOT

_HEAD = f"""#!{sys.executable}
import base64, json, struct, sys
sys.path.insert(0, {str(ROOT)!r})
from services.common.child_rpc.child import Channel, serve
channel = Channel.of_stdio()
"""

_PROCESSOR = """
channel.send_json({"facts": {"placeholders": ["<unwritten>", "<pic>"]}})
calls = 0
def reply(request):
    global calls
    verb, argument = json.loads(request)
    assert argument["placeholder"] == "<pic>"
    calls += 1
    if verb == "problem":
        return json.dumps([PROBLEM, None]).encode()
    if argument["width"] > 500:
        return json.dumps([{"refused": "too wide"}, None]).encode()
    return json.dumps([{"ids": [argument["width"], calls]}, None]).encode()
serve(channel, reply)
"""

_ENGINE = """
from services.preprocess.engines import host
from services.preprocess.engines.tokenizer import EngineFacts, MediaPrompt

MARK = "\\x01"

def url(part):
    kind, _, data = part["image_url"]["url"].partition(";base64,")
    assert kind == "data:image/png", kind
    return base64.b64decode(data)

class Tokenizer:
    facts = EngineFacts("1", 256, (2,), 0, "template", True, MEDIA, REASON)

    def render(self, chat):
        parts = [
            part
            for message in chat.messages
            for part in ([{"type": "text", "text": message["content"]}] if isinstance(message["content"], str)
                         else message["content"])
        ]
        return "".join(MARK if part["type"] == "image_url" else part["text"] for part in parts)

    def encode_chat(self, chat):
        return list(self.render(chat).encode())

    def encode_media(self, chat):
        files = [url(part) for message in chat.messages for part in message["content"] if part["type"] == "image_url"]
        widths = iter([struct.unpack(">I", data[16:20])[0] // 10 for data in files])
        ids, spans, unexpanded = [], [], self.encode_chat(chat)
        for token in unexpanded:
            width = next(widths, 0) if token == 1 else 0  # surplus placeholders stay, as with vLLM
            spans += [("image", len(ids), width)] * (width > 0)
            ids += [token] * max(1, width)
        return MediaPrompt(ids, unexpanded, spans)

    def encode_text(self, text, add_special_tokens=None):
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=False):
        return bytes(token_ids).decode("utf-8", "replace")

host.run(channel, *host.prepared(Tokenizer()), 60)
"""

ENGINE_MARK = "\x01"
"""What stands for an image in prompts of `write_image_engine`."""


def write_image_processor(file: Path, problem: str = "") -> str:
    """Writes an interpreter whose image processor returns the width of an image and the number of its call.

    It refuses images of over 500 pixels; its placeholder is "<pic>".

    Args:
        problem: why it must not be used.

    Returns:
        The file's name.
    """
    return _write(file, _PROCESSOR.replace("PROBLEM", repr(problem)))


def write_image_engine(file: Path, reason: str = "") -> str:
    """Writes an interpreter whose engine encodes bytes; an image has one token for each ten pixels of its width.

    Args:
        reason: why it takes no images; empty if it does.

    Returns:
        The file's name.
    """
    return _write(file, _ENGINE.replace("MEDIA", repr(() if reason else ("image",))).replace("REASON", repr(reason)))


def _write(file: Path, content: str) -> str:
    file.write_text(_HEAD + content)
    file.chmod(0o755)
    return str(file)
