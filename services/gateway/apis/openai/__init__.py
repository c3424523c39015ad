"""OpenAI's chat completion, completion, embedding and token APIs."""
