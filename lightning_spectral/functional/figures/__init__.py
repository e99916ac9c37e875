"""Figures that describe a spectrum or a way of sampling it."""
