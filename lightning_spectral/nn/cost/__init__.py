"""The cost of a sub-model to a client, before any training."""
