"""Mistakes that can be named before a round is run."""
