"""The OpenAI APIs: what their requests say, and how answers are written."""
