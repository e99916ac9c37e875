"""Modules whose weights are sampled combinations of a shorter vector of scores."""
