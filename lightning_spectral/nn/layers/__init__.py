"""Sharded layers, and the singular terms that they hold."""
