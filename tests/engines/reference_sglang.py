"""SGLang's own ids for chats: its tokenizer manager and its handler of chat completions, without a scheduler.

Runs in the environment that has sglang: ``python reference_sglang.py SERVICES FOLDER``; a line of JSON with an OpenAI
request in, a line with its token ids, or null for a refusal, out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from typing import Any


def serving(folder: str) -> Any:
    """SGLang's handler of chat completions for one model."""
    from sglang.srt import runtime_context
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.parser.template_manager import TemplateManager
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(model_path=folder, device="cpu", trust_request_chat_template=True)
    runtime_context.publish(arguments, role="tokenizer")
    manager = TokenizerManager(arguments, PortArgs.init_new(arguments))
    templates = TemplateManager()
    templates.initialize_templates(manager, folder)
    return OpenAIServingChat(manager, templates)


def answer(handler: Any, body: dict[str, Any]) -> list[int] | None:
    """Token ids as they would go to the scheduler; None when the server would answer 400."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    try:
        request = ChatCompletionRequest.model_validate(body)
        if handler._validate_request(request):
            return None
        internal, _ = handler._convert_to_internal_request(request)
    except ValueError:
        return None
    return [int(token) for token in internal.input_ids]


async def main(services_folder: str, folder: str) -> None:
    """Answers until standard input ends."""
    services = types.ModuleType("services")
    services.__path__ = [services_folder]
    sys.modules["services"] = services
    from services.common.packages.engines import NOT_NEEDED, stand_in_for_absent

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stand_in_for_absent(*NOT_NEEDED["sglang"])
    handler = serving(folder)
    for line in sys.stdin:
        print(json.dumps(answer(handler, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    asyncio.run(main(sys.argv[1], sys.argv[2]))
