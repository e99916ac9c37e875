"""What users choose from: the names of the top level, and those that stand only in its packages."""

from importlib import import_module
from typing import Any

import lightning_spectral as ls

# What the documentation names besides the top level.
IN_PACKAGES = {
    "algorithms": """
        AdapterAggregation MatrixMeans TermAggregation TermMeans narrow_model save_peft_adapter spectral_start
    """,
    "client": "LocalHook LogitsHook",
    "designs": "Coordinated Design JointDesign RandomSystematic",
    "errors": "LostProcessError RoundError",
    "filters": "Packing",
    "functional": "standardize_images",
    "functional.zampling": "Clip Link Sigmoid",
    "nn": """
        CostTable FrobeniusDecay WidthPlan unzample width_plan zample
    """,
    "participation": "Sampler",
    "partition": "Partitioner",
    "plugin": """
        AtomicCheckpointIO ClientParallelStrategy load_user_module tune_allocator
    """,
    "plugin.callbacks": """
        BatchNormEstimation ClientRow ClientTable RoundLines SampledNetworks SpectralDiagnostics UpdateAlignment
    """,
    "server": "Raise",
    "sharding": "ChannelChoice Scaled Schatten ShardingStrategy",
    "simulation": "DeviceProfile",
}
OF_PACKAGES = {name: place for place, names in IN_PACKAGES.items() for name in names.split()}
PLACES = {name: f"lightning_spectral.{place}" for name, place in {**ls._PLACES, **OF_PACKAGES}.items()}
PUBLIC: dict[str, Any] = {name: getattr(import_module(place), name) for name, place in PLACES.items()}
