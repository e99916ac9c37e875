"""Inclusion probabilities, multipliers and exact fixed-size draws, as plain functions."""
