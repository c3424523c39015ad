"""The command `conformance` and its report; an extension of the command line."""
