"""Example scripts, and config files with the data they use."""
