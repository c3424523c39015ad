"""KV-cache events of engines: decoding, ordering, and translation to the block hashes shared by all services."""
