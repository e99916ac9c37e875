"""The Lightning integration: from a user's Trainer and LightningModule to rounds."""

from lightning_spectral.plugin.allocator import tune_allocator
from lightning_spectral.plugin.checkpoint_files import AtomicCheckpointIO, latest_checkpoint
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.exports import narrow_model, save_peft_adapter
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model import MultiModelModule
from lightning_spectral.plugin.multi_model_data import MultiModelDataModule
from lightning_spectral.plugin.run_estimate import RunEstimate, estimate
from lightning_spectral.plugin.saved_modules import load_user_module

__all__ = [
    "AtomicCheckpointIO",
    "ClientParallelStrategy",
    "FederatedDataModule",
    "FederatedModule",
    "MultiModelDataModule",
    "MultiModelModule",
    "RunEstimate",
    "estimate",
    "latest_checkpoint",
    "load_user_module",
    "narrow_model",
    "save_peft_adapter",
    "tune_allocator",
]
