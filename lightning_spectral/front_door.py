"""What is found by name before it is imported: the top level of the package, and ``strategy="client_parallel"``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType, ModuleType

_NAMES = {
    "algorithms": """
        Algorithm AlternatingFactors Ditto FIARSE FedAvg FedBuff FedDyn FrozenA LoRA PaddedFactors QFedAvg SampledTerms
        Scaffold SpectralSharding StackedProducts StaleUpdates TruncatedProducts WidthSharding Zampling cost_table
        largest_that_fits
    """,
    "designs": "Brewer ConditionalPoisson MinimumSupport SuccessiveSampling Systematic",
    "errors": "ClientError SpectralWarning",
    "filters": """
        Attack ClientPrivacy ExamplePrivacy FedNova Filter Int8 LocalNoise MaxUpdateNorm Personal Robust SecureSums
        TopK UpdateBound UsualUpdateNorm Weights
    """,
    "nn": """
        EffectiveLRClip LayerChoices SpectralShardedConv1d SpectralShardedConv2d SpectralShardedConv3d
        SpectralShardedLinear replace_layers validate
    """,
    "participation": """
        FullParticipation LossVarianceReduced RoundRobin StaleUpdateVarianceReduced Uniform UpdateVarianceReduced
    """,
    "partition": """
        DirichletPartitioner IIDPartitioner LabelsPerClient NaturalPartitioner PachinkoPartitioner ShardPartitioner
        SizeLaw
    """,
    "plugin": "FederatedDataModule FederatedModule MultiModelDataModule MultiModelModule latest_checkpoint",
    "plugin.callbacks": """
        Aggregation ClientEvaluation CommunicationLedger RoundCallback RoundDashboard RoundHistory RoundProgressBar
        SVDRefresh SubmodelSampling
    """,
    "protocol": "Schedule",
    "sharding": "Collective EffectiveCohort PrefixChannels PriSM RandomChannels RollingChannels TopN Unbiased",
    "simulation": "ClientDropout VirtualClock",
    "sweep.clients": "compare_clients",
}
INSTEAD = MappingProxyType(  # what people type who come from elsewhere, and what to write here
    {
        "BoundedMomentum": "server_optimizer=ls.server.BoundedMomentum()",
        "CalibratedLogits": "local_hooks=[ls.client.CalibratedLogits(layer, rounds=...)]",
        "DPSGD": "filters=[ls.ExamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)]",
        "FedAdagrad": "server_optimizer=ls.server.FedAdagrad(lr=0.01)",
        "FedAdam": "server_optimizer=ls.server.FedAdam(lr=0.01)",
        "FedAvgM": "server_optimizer=ls.server.FedAvgM(momentum=0.9)",
        "FedBN": 'filters=[ls.Personal(["*norm*"])]',
        "FedHM": "ls.SpectralSharding.published(ls.TopN(), aggregation=ls.algorithms.MatrixMeans())",
        "FedLC": "local_hooks=[ls.client.CalibratedLogits(layer, rounds=...)]",
        "FedPer": 'filters=[ls.Personal(["head.*"])]',
        "FedProx": "local_hooks=[ls.client.ProximalTerm(0.01)]",
        "FedRep": 'filters=[ls.Personal(["head.*"], epochs=1)]',
        "FedRolex": "ls.WidthSharding(ls.RollingChannels())",
        "FedYogi": "server_optimizer=ls.server.FedYogi(lr=0.01)",
        "Faults": "faults=ls.server.Faults(on_error=ls.server.LeaveOut())",
        "FjORD": "ls.WidthSharding(step_widths=[...])",
        "GradientClip": "local_hooks=[ls.client.GradientClip(1.0)]",
        "HeteroFL": "ls.WidthSharding(ls.PrefixChannels())",
        "Krum": "filters=[ls.Robust(ls.server.Krum(2))]",
        "Median": "filters=[ls.Robust(ls.server.Median())]",
        "MultiKrum": "filters=[ls.Robust(ls.server.MultiKrum(2))]",
        "PrivacyEngine": "filters=[ls.ExamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)]",
        "ProximalTerm": "local_hooks=[ls.client.ProximalTerm(0.01)]",
        "SCAFFOLD": "ls.Scaffold()",
        "SpectralStart": "SpectralSharding(spectral_start=ls.algorithms.SpectralStart(...))",
        "leave_one_client_out": "ls.compare_clients(make, data, folder, trainer={...}, clients=[...])",
        "TrimmedMean": "filters=[ls.Robust(ls.server.TrimmedMean(0.1))]",
    }
)
NAMES = MappingProxyType({place: tuple(names.split()) for place, names in _NAMES.items()})  # by place
PLACES = MappingProxyType({name: place for place, names in NAMES.items() for name in names})
STRATEGIES = "lightning.pytorch.strategies"
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register_strategies() -> None:
    """Register the strategies with Lightning: now if it is imported already, otherwise as soon as it is."""
    if STRATEGIES in sys.modules:
        _register(sys.modules[STRATEGIES])
    else:
        sys.meta_path.insert(0, _AwaitsLightning())


class _AwaitsLightning(MetaPathFinder):
    """Finds Lightning's strategies as Python does, registers the names once they are imported, and withdraws."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == STRATEGIES else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(strategies: ModuleType) -> None:
    for suffix, start_method in START_METHODS.items():
        strategies.StrategyRegistry.register(
            f"client_parallel{suffix}",
            lambda **options: import_module("lightning_spectral.plugin").ClientParallelStrategy(**options),
            description=f"Clients of a round spread over processes, started by '{start_method}'",
            start_method=start_method,
        )
