"""The command line: fit, validate and test from YAML."""
