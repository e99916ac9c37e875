"""The papers' models as plain `torch.nn` modules, and LightningModules that train them on a task."""

from lightning_spectral.models.attention import SelfAttention
from lightning_spectral.models.language import CharTransformer, LSTMClassifier
from lightning_spectral.models.tasks import HasExampleInput, LitClassifier, LitNextToken
from lightning_spectral.models.vision import CCT, FEMNISTCNN, MLP, ResNet18

__all__ = [
    "CCT",
    "FEMNISTCNN",
    "MLP",
    "CharTransformer",
    "HasExampleInput",
    "LSTMClassifier",
    "LitClassifier",
    "LitNextToken",
    "ResNet18",
    "SelfAttention",
]
