"""The cost of a model to a client: one forward pass that is counted, and tables of costs."""
