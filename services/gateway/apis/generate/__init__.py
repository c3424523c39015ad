"""The API of token ids in and token ids out, as vLLM serves it at /inference/v1/generate."""
