"""Algorithms whose server remembers something of each client: stale updates, and SCAFFOLD's control variates."""
