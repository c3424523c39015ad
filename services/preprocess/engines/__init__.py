"""The engines' tokenizers. Each runs in its own processes, possibly with another interpreter.

Modules imported here may only need the standard library: the other interpreter may lack our dependencies.
"""
