"""Calls to child processes that run code this process does not trust or cannot import.

Two policies share the framing, the launcher, the connection, the queue of calls and the child's main loop: a limited
child runs foreign code (templates, custom parsers), and an engine child runs an engine's package, possibly in another
interpreter. `child` and `framing` import only the standard library, because that interpreter may lack our dependencies.
"""
