"""What SGLang's own Engine makes of prompts, one at a time: a JSON document in, one out (see engine_suite)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from services.worker.engines.sglang import import_stubs as stand_ins

stand_ins.install()  # here and in the processes that SGLang spawns, which read this file first
stand_ins.forgo_pinned_memory()
stand_ins.declare_operators()


def chat_answer(engine: Any, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """The answer to a chat with images, rendered by the tokenizer's template as SGLang's server does."""
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    prompt = engine.tokenizer_manager.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    made = engine.generate(
        prompt=prompt,
        image_data=[part["image_url"]["url"] for part in parts if part["type"] == "image_url"],
        sampling_params={"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
    )
    return {"token_ids": made["output_ids"], "prompt_tokens": made["meta_info"]["prompt_tokens"], "text": made["text"]}


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """As an application that embeds SGLang would ask: text machinery and all, nothing streamed, no cache."""
    import sglang

    embeds = bool(question.get("embed"))
    engine = sglang.Engine(
        model_path=question["model"],
        is_embedding=embeds,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        max_total_tokens=8192,
        mm_attention_backend="sdpa",
        lora_backend="torch_native",
        enable_lora="adapter" in question or None,
        lora_paths=[f"asked={question['adapter']}"] if "adapter" in question else None,
    )
    count = question.get("logprobs", 0)
    outputs, embeddings = [], []
    for prompt in question["prompts"]:
        if embeds:
            loop = engine.loop
            asked = sglang.srt.managers.io_struct.EmbeddingReqInput(input_ids=prompt)
            embeddings.append(
                loop.run_until_complete(anext(engine.tokenizer_manager.generate_request(asked)))["embedding"]
            )
            continue
        made = engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": question["max_tokens"], "ignore_eos": True},
            return_logprob=bool(count),
            top_logprobs_num=count,
            lora_path="asked" if "adapter" in question else None,
        )
        tops = made["meta_info"].get("output_top_logprobs", [])
        outputs.append(
            {
                "token_ids": made["output_ids"],
                "logprobs": [{str(token_id): logprob for logprob, token_id, _ in top} for top in tops],
            }
        )
    outputs += [chat_answer(engine, chat, question["max_tokens"]) for chat in question.get("chats", ())]
    engine.shutdown()
    return {"outputs": outputs, "embeddings": embeddings}


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(answer(json.load(sys.stdin))), file=replies, flush=True)
