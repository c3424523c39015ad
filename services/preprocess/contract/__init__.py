"""What a tokenizer implementation receives and provides."""
