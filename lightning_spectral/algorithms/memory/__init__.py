"""Algorithms that remember something of each client: at the server, stale updates; on devices, controls and models."""
