"""The gateway's view of workers: registry, connections, load overview and tokenizer parity."""
