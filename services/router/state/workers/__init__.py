"""Workers attached to this replica: registration, leases, streams and load reports."""
