"""How clients hold each layer of a module, decided before any training, and the swap."""
