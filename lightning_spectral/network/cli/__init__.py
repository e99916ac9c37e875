"""``python -m lightning_spectral network``: writes an app for Flower, and shows one on this machine."""
