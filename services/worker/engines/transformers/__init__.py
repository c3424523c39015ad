"""Real models by Hugging Face transformers: continuous batching over a paged cache, on a CPU or a GPU."""
