"""Stores for the router's state: in the memory of one process, or in Redis shared by all replicas."""
