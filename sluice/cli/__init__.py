"""The command line: `sluice up` runs the whole suite as local processes."""
