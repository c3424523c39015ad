"""Reservations: which request is booked on which rank, who owns it, and how loads are corrected."""
