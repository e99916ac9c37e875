"""The names of the front door, and where each is found on first use."""

from __future__ import annotations

from types import MappingProxyType

_NAMES = {
    "algorithms": """
        Algorithm AlternatingFactors FIARSE FedAvg FrozenA LoRA PaddedFactors SampledTerms Scaffold SpectralSharding
        StackedProducts StaleUpdates TruncatedProducts WidthSharding Zampling cost_table largest_that_fits
    """,
    "designs": "Brewer ConditionalPoisson MinimumSupport SuccessiveSampling Systematic",
    "errors": "ClientError SpectralWarning",
    "nn": """
        EffectiveLRClip LayerChoices SpectralShardedConv1d SpectralShardedConv2d SpectralShardedConv3d
        SpectralShardedLinear replace_layers validate
    """,
    "participation": """
        FullParticipation LossVarianceReduced RoundRobin StaleUpdateVarianceReduced Uniform UpdateVarianceReduced
    """,
    "partition": "DirichletPartitioner IIDPartitioner NaturalPartitioner PachinkoPartitioner",
    "plugin": "FederatedDataModule FederatedModule MultiModelDataModule MultiModelModule latest_checkpoint",
    "plugin.callbacks": """
        Aggregation ClientEvaluation CommunicationLedger RoundCallback RoundDashboard RoundHistory RoundProgressBar
        SVDRefresh SubmodelSampling
    """,
    "protocol": "Schedule",
    "sharding": "Collective EffectiveCohort PrefixChannels PriSM RandomChannels RollingChannels TopN Unbiased",
    "simulation": "ClientDropout VirtualClock",
}

NAMES = MappingProxyType({place: tuple(names.split()) for place, names in _NAMES.items()})  # by place
PLACES = MappingProxyType({name: place for place, names in NAMES.items() for name in names})
