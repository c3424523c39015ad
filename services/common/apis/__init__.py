"""Request bodies of each API, read into prompts: pure, for every service that has to know them."""
