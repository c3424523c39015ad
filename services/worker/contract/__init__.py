"""Defines the contract between a worker and its engine; engine authors subclass `engine.LLMEngine`."""
