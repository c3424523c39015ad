"""Protobuf messages and the router's own types, in both directions."""
