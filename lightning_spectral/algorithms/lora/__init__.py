"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""
