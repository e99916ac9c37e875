"""Measures of a spectrum, or of a way of sampling it."""
