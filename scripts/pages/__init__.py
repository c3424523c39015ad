"""The pages of docs that are made from the code: `python -m scripts.pages --write` makes them again."""
