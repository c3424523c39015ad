"""TLS, identities, bearer tokens and the policy that says which peer may call which method."""
