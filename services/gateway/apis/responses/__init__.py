"""OpenAI's Responses API and the bounded store of its responses."""
