"""The child process that runs parsers which are not Sluice's own, and its client."""
