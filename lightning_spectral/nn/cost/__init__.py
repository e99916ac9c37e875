"""What a sub-model costs a client, before any training."""
