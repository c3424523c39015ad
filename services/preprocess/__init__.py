"""Preprocess: requests in, exactly the token ids the engine itself would have made out."""
