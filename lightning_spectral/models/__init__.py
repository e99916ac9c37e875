"""The papers' models as plain `torch.nn` modules, and LightningModules that train them on a task."""

from lightning_spectral.models.attention import SelfAttention
from lightning_spectral.models.cct import CCT
from lightning_spectral.models.cnn import FEMNISTCNN
from lightning_spectral.models.gpt import CharTransformer
from lightning_spectral.models.lstm import LSTMClassifier
from lightning_spectral.models.mlp import MLP
from lightning_spectral.models.resnet import ResNet18
from lightning_spectral.models.tasks import HasExampleInput, LitClassifier, LitNextToken

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
