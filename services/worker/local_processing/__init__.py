"""What stands before and after an engine that knows token ids only: prompts are made, and text."""
