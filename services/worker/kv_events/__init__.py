"""KV events of real engines: decoded, put in order, and told again in block hashes all services agree on."""
