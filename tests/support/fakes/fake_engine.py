"""Stands for an engine in a process of its own: real host, real frames, and a tokenizer that can be told to misbehave.

``python fake_engine.py SERVICES MODE``; MODE is "ready", "refuses", "dies" or "hangs" and says how it starts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Sequence
from typing import Any, cast


def _services_only(folder: str) -> None:
    services = types.ModuleType("services")
    services.__path__ = [folder]
    sys.modules["services"] = services


def main(folder: str, mode: str) -> None:
    _services_only(folder)
    from services.common.base.errors import ErrorKind, SluiceError
    from services.common.child_rpc.child import Channel
    from services.preprocess.contract.tokenizer import ChatRequest
    from services.preprocess.engines import host
    from services.preprocess.engines.tokenizer import EngineFacts, error_form

    class Tokenizer:
        facts = EngineFacts("1", 256, (2,), 0, "template", True)

        def encode_chat(self, chat: ChatRequest) -> list[int]:
            text = self.render(chat)
            if text == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "hang":
                time.sleep(3600)
            if text == "fail":
                raise ValueError("this will not do.")
            if text == "memory":
                raise MemoryError
            return list(text.encode())

        def render(self, chat: ChatRequest) -> str:
            return str(chat.messages[-1]["content"])

        def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
            print("noise on standard output")
            return list(text.encode())

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return bytes(token_ids).decode("utf-8", "surrogateescape")

    channel = Channel.of_stdio()
    if mode == "dies":
        sys.exit(3)
    if mode == "hangs":
        time.sleep(3600)
    if mode == "refuses":
        channel.send_json({"error": error_form(SluiceError(ErrorKind.FAILED_PRECONDITION, "No such engine."))})
        return
    host.run(channel, *host.prepared(cast(Any, Tokenizer())), 60)  # no media


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
