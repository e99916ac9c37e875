"""Algorithms that remember something about each client: at the server, stale updates; on devices, controls, models."""
