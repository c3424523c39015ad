"""TLS, identities, bearer tokens, and the policy of which peer may call which method."""
