"""Serves models with Hugging Face transformers: continuous batching with a paged KV cache, on a CPU or a GPU."""
