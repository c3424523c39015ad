"""Rules for rows of many streams that share a message, a batch, a step or a write."""
