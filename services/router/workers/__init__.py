"""Workers attached to this replica: registration, leases, their streams and what they report."""
