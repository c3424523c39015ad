"""Discovery of workers and models: what workers register, its checks, and the tokenizers they deliver."""
