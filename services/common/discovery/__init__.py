"""Discovery of workers and models: worker registrations, their checks, and tokenizers fetched from workers."""
