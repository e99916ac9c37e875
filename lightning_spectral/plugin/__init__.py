"""The Lightning integration: from a user's Trainer and LightningModule to rounds."""

from lightning_spectral.plugin.data.data_module import FederatedDataModule
from lightning_spectral.plugin.data.multi_model import MultiModelDataModule
from lightning_spectral.plugin.exports import narrow_model, save_peft_adapter
from lightning_spectral.plugin.lightning.allocator import tune_allocator
from lightning_spectral.plugin.lightning.checkpoint_files import AtomicCheckpointIO, latest_checkpoint
from lightning_spectral.plugin.lightning.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.lightning.saved_modules import load_user_module
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model import MultiModelModule

__all__ = [
    "AtomicCheckpointIO",
    "ClientParallelStrategy",
    "FederatedDataModule",
    "FederatedModule",
    "MultiModelDataModule",
    "MultiModelModule",
    "latest_checkpoint",
    "load_user_module",
    "narrow_model",
    "save_peft_adapter",
    "tune_allocator",
]
