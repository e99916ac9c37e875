"""Clients' data as a LightningDataModule."""
