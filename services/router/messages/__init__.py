"""Converts between protobuf messages and the router's types."""
