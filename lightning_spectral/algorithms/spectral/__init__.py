"""Spectral sharding: clients train sampled singular terms of every affine layer."""
