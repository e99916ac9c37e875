"""The Lightning integration: from a user's Trainer and LightningModule to rounds."""

from lightning_spectral.plugin.checkpoint_files import AtomicCheckpointIO, latest_checkpoint, load_user_module
from lightning_spectral.plugin.data import FederatedDataModule, MultiModelDataModule
from lightning_spectral.plugin.module import FederatedModule, MultiModelModule
from lightning_spectral.plugin.processes import ClientParallelStrategy, tune_allocator

__all__ = [
    "AtomicCheckpointIO",
    "ClientParallelStrategy",
    "FederatedDataModule",
    "FederatedModule",
    "MultiModelDataModule",
    "MultiModelModule",
    "latest_checkpoint",
    "load_user_module",
    "tune_allocator",
]
