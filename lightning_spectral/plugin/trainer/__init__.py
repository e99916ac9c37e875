"""A Trainer as what runs a federation."""
