"""What vLLM's own LLM makes of prompts, offline: a JSON document in, one out (see engine_suite)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def generated(question: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of every prompt."""
    adapter = question.get("adapter")
    llm = engine(question, enable_lora=bool(adapter))
    params = SamplingParams(
        temperature=0,
        max_tokens=question["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=question.get("logprobs"),
        prompt_logprobs=question.get("prompt_logprobs"),
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in question["prompts"]]
    lora = LoRARequest("offline", 1, adapter) if adapter else None
    return [
        {
            "token_ids": list(answer.outputs[0].token_ids),
            "logprobs": [
                {str(token_id): entry.logprob for token_id, entry in found.items()}
                for found in answer.outputs[0].logprobs or ()
            ],
            "prompt_logprobs": [
                found and {str(token_id): entry.logprob for token_id, entry in found.items()}
                for found in answer.prompt_logprobs or ()
            ],
        }
        for answer in llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
    ]


def embedded(question: dict[str, Any]) -> list[list[float]]:
    """Vectors of every prompt."""
    llm = engine(question, runner="pooling")
    prompts = [{"prompt_token_ids": prompt} for prompt in question["prompts"]]
    return [answer.outputs.embedding for answer in llm.embed(prompts, use_tqdm=False)]


def engine(question: dict[str, Any], **options: Any) -> LLM:
    """In this process, with the worker's dimensions."""
    return LLM(
        question["model"],
        distributed_executor_backend="uni",
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=2048,
        num_gpu_blocks_override=128,
        max_num_seqs=64,
        **options,
    )


def main() -> None:
    """Reads the question from standard input."""
    question = json.load(sys.stdin)
    answer = {"embeddings": embedded(question)} if question.get("embed") else {"outputs": generated(question)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
