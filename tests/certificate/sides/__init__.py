"""What makes prompts of conversations and answers of tokens: Sluice, and the engines' own code."""
