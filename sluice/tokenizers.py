"""The contract for tokenizers of models that neither Hugging Face's nor Mistral's library serves.

A tokenizer is a class derived from `TokenizerProtocol`, of which `tokenize` and `decode` must be implemented, named in
`--models NAME=SOURCE@MODULE:CLASS` of preprocess (docs/preprocessing.md, which has an example).
"""

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.packages.model_files import fingerprint
from services.preprocess.contract.generation_defaults import NO_DEFAULTS, GenerationDefaults, generation_defaults
from services.preprocess.contract.tokenizer import (
    ChatRequest,
    ChatTokenizer,
    Message,
    PendingPrompt,
    TokenizerFacts,
    TokenizerProtocol,
    Tool,
)

__all__ = [
    "NO_DEFAULTS",
    "ChatRequest",
    "ChatTokenizer",
    "ErrorKind",
    "GenerationDefaults",
    "Message",
    "PendingPrompt",
    "SluiceError",
    "TokenizerFacts",
    "TokenizerProtocol",
    "Tool",
    "fingerprint",
    "generation_defaults",
    "invalid",
]
