"""OpenAI's Responses API: items in, items out, and a bounded memory of what was answered."""
