"""``python -m lightning_spectral doctor``: whether federations are right on this machine, to paste into an issue."""
