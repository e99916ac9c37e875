"""Federated learning of models that no client can hold whole: spectral model sharding for PyTorch Lightning.

What most users need is here; the rest is in the packages below. Importing this imports neither Lightning nor
torch: a name is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_spectral.front_door import INSTEAD as _INSTEAD
from lightning_spectral.front_door import PLACES as _PLACES
from lightning_spectral.front_door import register_strategies

if TYPE_CHECKING:  # the same names as below: what type checkers and editors see
    from lightning_spectral import algorithms as algorithms
    from lightning_spectral import client as client
    from lightning_spectral import designs as designs
    from lightning_spectral import errors as errors
    from lightning_spectral import filters as filters
    from lightning_spectral import functional as functional
    from lightning_spectral import models as models
    from lightning_spectral import network as network
    from lightning_spectral import nn as nn
    from lightning_spectral import participation as participation
    from lightning_spectral import partition as partition
    from lightning_spectral import plugin as plugin
    from lightning_spectral import protocol as protocol
    from lightning_spectral import report as report
    from lightning_spectral import server as server
    from lightning_spectral import sharding as sharding
    from lightning_spectral import simulation as simulation
    from lightning_spectral import testing as testing
    from lightning_spectral.algorithms import FIARSE as FIARSE
    from lightning_spectral.algorithms import Algorithm as Algorithm
    from lightning_spectral.algorithms import AlternatingFactors as AlternatingFactors
    from lightning_spectral.algorithms import Ditto as Ditto
    from lightning_spectral.algorithms import FedAvg as FedAvg
    from lightning_spectral.algorithms import FedDyn as FedDyn
    from lightning_spectral.algorithms import FrozenA as FrozenA
    from lightning_spectral.algorithms import LoRA as LoRA
    from lightning_spectral.algorithms import PaddedFactors as PaddedFactors
    from lightning_spectral.algorithms import QFedAvg as QFedAvg
    from lightning_spectral.algorithms import SampledTerms as SampledTerms
    from lightning_spectral.algorithms import Scaffold as Scaffold
    from lightning_spectral.algorithms import SpectralSharding as SpectralSharding
    from lightning_spectral.algorithms import StackedProducts as StackedProducts
    from lightning_spectral.algorithms import StaleUpdates as StaleUpdates
    from lightning_spectral.algorithms import TruncatedProducts as TruncatedProducts
    from lightning_spectral.algorithms import WidthSharding as WidthSharding
    from lightning_spectral.algorithms import Zampling as Zampling
    from lightning_spectral.algorithms import cost_table as cost_table
    from lightning_spectral.algorithms import largest_that_fits as largest_that_fits
    from lightning_spectral.designs import Brewer as Brewer
    from lightning_spectral.designs import ConditionalPoisson as ConditionalPoisson
    from lightning_spectral.designs import MinimumSupport as MinimumSupport
    from lightning_spectral.designs import SuccessiveSampling as SuccessiveSampling
    from lightning_spectral.designs import Systematic as Systematic
    from lightning_spectral.errors import ClientError as ClientError
    from lightning_spectral.errors import SpectralWarning as SpectralWarning
    from lightning_spectral.filters import ClientPrivacy as ClientPrivacy
    from lightning_spectral.filters import Filter as Filter
    from lightning_spectral.filters import Int8 as Int8
    from lightning_spectral.filters import LocalNoise as LocalNoise
    from lightning_spectral.filters import MaxUpdateNorm as MaxUpdateNorm
    from lightning_spectral.filters import Personal as Personal
    from lightning_spectral.filters import Robust as Robust
    from lightning_spectral.filters import SecureSums as SecureSums
    from lightning_spectral.filters import TopK as TopK
    from lightning_spectral.filters import UpdateBound as UpdateBound
    from lightning_spectral.filters import UsualUpdateNorm as UsualUpdateNorm
    from lightning_spectral.filters import Weights as Weights
    from lightning_spectral.nn import EffectiveLRClip as EffectiveLRClip
    from lightning_spectral.nn import LayerChoices as LayerChoices
    from lightning_spectral.nn import SpectralShardedConv1d as SpectralShardedConv1d
    from lightning_spectral.nn import SpectralShardedConv2d as SpectralShardedConv2d
    from lightning_spectral.nn import SpectralShardedConv3d as SpectralShardedConv3d
    from lightning_spectral.nn import SpectralShardedLinear as SpectralShardedLinear
    from lightning_spectral.nn import replace_layers as replace_layers
    from lightning_spectral.nn import validate as validate
    from lightning_spectral.participation import FullParticipation as FullParticipation
    from lightning_spectral.participation import LossVarianceReduced as LossVarianceReduced
    from lightning_spectral.participation import RoundRobin as RoundRobin
    from lightning_spectral.participation import StaleUpdateVarianceReduced as StaleUpdateVarianceReduced
    from lightning_spectral.participation import Uniform as Uniform
    from lightning_spectral.participation import UpdateVarianceReduced as UpdateVarianceReduced
    from lightning_spectral.partition import DirichletPartitioner as DirichletPartitioner
    from lightning_spectral.partition import IIDPartitioner as IIDPartitioner
    from lightning_spectral.partition import NaturalPartitioner as NaturalPartitioner
    from lightning_spectral.partition import PachinkoPartitioner as PachinkoPartitioner
    from lightning_spectral.plugin import FederatedDataModule as FederatedDataModule
    from lightning_spectral.plugin import FederatedModule as FederatedModule
    from lightning_spectral.plugin import MultiModelDataModule as MultiModelDataModule
    from lightning_spectral.plugin import MultiModelModule as MultiModelModule
    from lightning_spectral.plugin import latest_checkpoint as latest_checkpoint
    from lightning_spectral.plugin.callbacks import Aggregation as Aggregation
    from lightning_spectral.plugin.callbacks import ClientEvaluation as ClientEvaluation
    from lightning_spectral.plugin.callbacks import CommunicationLedger as CommunicationLedger
    from lightning_spectral.plugin.callbacks import RoundCallback as RoundCallback
    from lightning_spectral.plugin.callbacks import RoundDashboard as RoundDashboard
    from lightning_spectral.plugin.callbacks import RoundHistory as RoundHistory
    from lightning_spectral.plugin.callbacks import RoundProgressBar as RoundProgressBar
    from lightning_spectral.plugin.callbacks import SubmodelSampling as SubmodelSampling
    from lightning_spectral.plugin.callbacks import SVDRefresh as SVDRefresh
    from lightning_spectral.protocol import Schedule as Schedule
    from lightning_spectral.sharding import Collective as Collective
    from lightning_spectral.sharding import EffectiveCohort as EffectiveCohort
    from lightning_spectral.sharding import PrefixChannels as PrefixChannels
    from lightning_spectral.sharding import PriSM as PriSM
    from lightning_spectral.sharding import RandomChannels as RandomChannels
    from lightning_spectral.sharding import RollingChannels as RollingChannels
    from lightning_spectral.sharding import TopN as TopN
    from lightning_spectral.sharding import Unbiased as Unbiased
    from lightning_spectral.simulation import ClientDropout as ClientDropout
    from lightning_spectral.simulation import VirtualClock as VirtualClock

__version__ = "0.1.0"

_ROOMS = {place.partition(".")[0] for place in _PLACES.values()} | {
    *("client", "functional", "server", "models", "network", "report", "testing")
}

__all__ = sorted(_PLACES)

if not TYPE_CHECKING:  # for a type checker, a module that has `__getattr__` has every name

    def __getattr__(name: str) -> Any:
        """Import a name on first use."""
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        if name in _PLACES:
            globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
            return globals()[name]
        instead = f": write {_INSTEAD[name]}" if name in _INSTEAD else ""
        said = f"module {__name__!r} has no attribute {name!r}{instead}"
        raise AttributeError(said, name=name, obj=import_module(__name__))


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, *(name for name in globals() if name.startswith("__"))})


register_strategies()
