"""Running vLLM and SGLang servers of `sluice up --engines`: where they are listed, and the worker of each."""
