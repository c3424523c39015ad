"""Redis: URLs, topologies, TLS, and scripts with a deadline."""
