"""The names of vLLM's and SGLang's parsers.

They run in processes of their own, possibly with another interpreter, which import this module too: it imports only the
standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class BundledParsers:
    """Names of an engine's parsers, taken from the tested version of its package."""

    tool: frozenset[str]
    reasoning: frozenset[str]

    def of(self, kind: str) -> frozenset[str]:
        """Returns the names of one kind, `tool` or `reasoning`."""
        return self.tool if kind == "tool" else self.reasoning


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ENGINES: dict[str, BundledParsers] = {
    "vllm": BundledParsers(
        _names(
            "apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 "
            "deepseek_v41  dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc "
            "granite4 hermes hf hunyuan_a13b  hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 "
            "ling3 llama3_json llama4_json  llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral "
            "muse muse_glimmer musespark1x olmo3 openai  phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder "
            "qwen3_json qwen3_xml seed_oss step3 step3p5 step5 xlam "
        ),
        _names(
            "beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 "
            "glm45  glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon "
            "kimi_k2 kimi_k3  ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral muse "
            "muse_glimmer musespark1x  nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 "
            "step3p5 step5 "
        ),
    ),
    "sglang": BundledParsers(
        _names(
            "apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 deepseekv41 dots "
            "gemma4  gigachat3 gigachat35 glm glm45 glm47 gpt-oss hermes hunyuan inkling interns1 iquest_q1 "
            "k2_horizon kimi_k2  kimi_k3 lfm2 ling3 llama3 mimo minicpm5 minimax-m2 minimax-m3 mistral muse "
            "nanbeige poolside_v1 pythonic qwen  qwen25 qwen3_coder response_template spark25 step3 step3p5 "
            "trinity "
        ),
        _names(
            "apertus2509 beam cohere_command4 deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots gemma4 "
            "gigachat35 glm45  gpt-oss granite_thinking_parser hunyuan inkling interns1 iquest_q1 k2_horizon kimi "
            "kimi_k2 kimi_k3 ling3 mimo  minimax minimax-append-think minimax-m3 mistral muse nanbeige nemotron_3 "
            "poolside_v1 qwen3 qwen3-thinking  response_template step3 step3p5 "
        ),
    ),
}


def engine_of(name: str) -> str:
    """Returns the engine of a name such as `vllm:hermes`; empty for none."""
    engine, separator, _ = name.partition(":")
    return engine if separator and engine in ENGINES else ""


def bare(name: str) -> str:
    """Returns a name without its engine prefix."""
    return name.partition(":")[2] if engine_of(name) else name


def nearest(name: str, known: frozenset[str]) -> list[str]:
    """Returns up to three similar names, best first."""
    return get_close_matches(name, sorted(known), n=3, cutoff=0.4)
