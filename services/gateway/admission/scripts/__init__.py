"""Lua scripts of the shared limits, one atomic decision each."""
