"""Example scripts, and configs with the data that they use."""
