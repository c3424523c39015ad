"""Block-structured output (text, reasoning, tool calls): shared by the Messages and Responses APIs."""
