"""The engines' tokenizers. Each runs in its own processes, possibly with another interpreter.

What the processes import may only need the standard library: the other interpreter may lack our dependencies. Only
`engine_tokenizer` and `processor_rule` run in preprocess: they call the processes.
"""
