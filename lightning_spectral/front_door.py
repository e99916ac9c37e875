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
    "algorithms.spectral.start": "SpectralStart",
    "client": "CalibratedLogits FixedBatchNorm GradientClip MaskedLogits ProximalTerm",
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
    "server": """
        BoundedMomentum Faults FedAdagrad FedAdam FedAvgM FedYogi GeometricMedian Krum LeaveOut Median MultiKrum
        TrimmedMean
    """,
    "sharding": "Collective EffectiveCohort PrefixChannels PriSM RandomChannels RollingChannels TopN Unbiased",
    "simulation": "ClientDropout VirtualClock",
    "sweep.clients": "compare_clients",
}
INSTEAD = MappingProxyType(  # what people type who come from elsewhere, and what to write here
    {
        "DPSGD": "filters=[ls.ExamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)]",
        "FedAsync": "ls.FedBuff(concurrency=10)",
        "FedBN": 'filters=[ls.Personal(["*norm*"])]',
        "FedHM": "ls.SpectralSharding.published(ls.TopN(), aggregation=ls.algorithms.MatrixMeans())",
        "FedLC": "local_hooks=[ls.CalibratedLogits(layer, rounds=...)]",
        "FedMedian": "filters=[ls.Robust(ls.Median())]",
        "FedOpt": "server_optimizer=ls.FedAdam(lr=0.01)",
        "FedPer": 'filters=[ls.Personal(["head.*"])]',
        "FedProx": "local_hooks=[ls.ProximalTerm(0.01)]",
        "FedRep": 'filters=[ls.Personal(["head.*"], epochs=1)]',
        "FedRolex": "ls.WidthSharding(ls.RollingChannels())",
        "FedTrimmedAvg": "filters=[ls.Robust(ls.TrimmedMean(0.1))]",
        "FjORD": "ls.WidthSharding(step_widths=[...])",
        "HeteroFL": "ls.WidthSharding(ls.PrefixChannels())",
        "IidPartitioner": "ls.IIDPartitioner(num_clients=10)",
        "leave_one_client_out": "ls.compare_clients(make, data, folder, trainer={...}, clients=[...])",
        "NaturalIdPartitioner": "ls.NaturalPartitioner([...])",
        "PathologicalPartitioner": "ls.LabelsPerClient(num_clients=10, num_labels=2)",
        "PrivacyEngine": "filters=[ls.ExamplePrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)]",
        **dict.fromkeys(("run_simulation", "start_simulation"), "lightning.pytorch.Trainer(...).fit(model, data)"),
        "SCAFFOLD": "ls.Scaffold()",
        **dict.fromkeys(("SecAgg", "SecAggPlus"), "filters=[ls.SecureSums()]"),
        "SizePartitioner": 'ls.IIDPartitioner(num_clients=10, sizes=ls.SizeLaw("lognormal", 1.0))',
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
