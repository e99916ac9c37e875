"""What a device runs: it answers messages, and knows nothing of the network that brings them."""
