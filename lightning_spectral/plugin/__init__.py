"""The Lightning integration: from a user's Trainer and LightningModule to rounds."""
