"""Sweeps: one run for each combination of settings and seeds, then a table and a report that compare them."""
