"""OpenAI's files and batches: requests of a file that run in the background, at the lowest priority."""
