"""What happens to updates, whatever the algorithm: choices for ``FederatedModule(..., filters=[...])``."""

# Files with filters evaluate annotations eagerly, as `algorithms/base.py` does.
from lightning_spectral.algorithms.filter import (
    Arrival,
    Filter,
    Fit,
    Form,
    Opened,
    Plan,
    ServerEnd,
    Unpacking,
    Unusable,
    check_chain,
    together,
)
from lightning_spectral.client.device import DeviceEnd, DeviceTurn
from lightning_spectral.filters.bounds import MaxUpdateNorm, UpdateBound, UsualUpdateNorm
from lightning_spectral.filters.example_privacy import ExamplePrivacy
from lightning_spectral.filters.noise import LocalNoise
from lightning_spectral.filters.packing import Int8, Packing, TopK
from lightning_spectral.filters.personal import Personal
from lightning_spectral.filters.privacy import ClientPrivacy
from lightning_spectral.filters.robust import Attack, Robust
from lightning_spectral.filters.secure_sums import SecureSums
from lightning_spectral.filters.weights import FedNova, Weights

__all__ = [
    "Arrival",
    "Attack",
    "ClientPrivacy",
    "DeviceEnd",
    "DeviceTurn",
    "ExamplePrivacy",
    "FedNova",
    "Filter",
    "Fit",
    "Form",
    "Int8",
    "LocalNoise",
    "MaxUpdateNorm",
    "Opened",
    "Packing",
    "Personal",
    "Plan",
    "Robust",
    "SecureSums",
    "ServerEnd",
    "TopK",
    "Unpacking",
    "Unusable",
    "UpdateBound",
    "UsualUpdateNorm",
    "Weights",
    "check_chain",
    "together",
]
