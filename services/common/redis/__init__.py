"""Redis wherever it is: its URLs, its topologies, its TLS, and scripts with a deadline."""
