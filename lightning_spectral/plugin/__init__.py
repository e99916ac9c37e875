"""All that knows Lightning: from a user's Trainer and LightningModule to rounds."""
