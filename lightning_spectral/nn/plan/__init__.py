"""What happens to each layer of a module, decided before any training, and the swap."""
