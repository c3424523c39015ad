"""The fault matrix: every fault against every part of a suite under every kind of load, and what clients notice."""
