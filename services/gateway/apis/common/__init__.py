"""One answer as a turn of blocks (text, thinking, calls): what Anthropic's messages and OpenAI's responses share."""
