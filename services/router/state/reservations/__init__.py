"""Reservations of requests on ranks: their table, owners, lifecycle and correction."""
