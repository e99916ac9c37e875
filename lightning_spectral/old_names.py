"""Names that were at the top level in 0.1, and are now found in the packages; until 0.2 they work, with a warning."""

import warnings
from types import FrameType

MOVED = {
    "algorithms": """
        AdapterAggregation LoRACostTable MatrixMeans SpectralStart TermAggregation TermMeans lora_cost_table
        rank_for spectral_start sub_model_cost_table sub_model_keep_ratio_for
    """,
    "client": "GradientClip LocalHook MaskedLogits ProximalTerm",
    "designs": "Coordinated Design JointDesign RandomSystematic",
    "errors": "LostProcessError RoundError",
    "functional": "standardize_images",
    "functional.zampling": "Clip Link Sigmoid",
    "nn": """
        CostTable FrobeniusDecay WidthPlan ZamplingCostTable compression_for keep_ratio_for unzample width_plan
        zample zampling_cost_table
    """,
    "participation": "Sampler",
    "partition": "Partitioner",
    "plugin": """
        AtomicCheckpointIO ClientParallelStrategy RunEstimate estimate load_user_module narrow_model
        save_peft_adapter tune_allocator
    """,
    "plugin.callbacks": """
        BatchNormEstimation ClientRow ClientTable RoundLines SampledNetworks SpectralDiagnostics UpdateAlignment
    """,
    "server": "Faults FedAdagrad FedAdam FedAvgM FedYogi LeaveOut Raise",
    "sharding": "ChannelChoice Scaled Schatten ShardingStrategy",
    "simulation": "DeviceProfile",
}
PLACES = {name: f"lightning_spectral.{place}" for place, names in MOVED.items() for name in names.split()}
NEW_PATHS = {f"lightning_spectral.{name}": f"{place}.{name}" for name, place in PLACES.items()}


def is_old_name(name: str, caller: FrameType) -> bool:
    """Whether a name was at the top level, unless jsonargparse looks for the path that it will write into configs."""
    return name in PLACES and caller.f_code.co_name != "get_import_path"


def new_place(name: str) -> str:
    """Where an old name is found now; whoever reads it at the top level of the package is told."""
    old = f"lightning_spectral.{name}"
    message = f"`{old}` is now `{NEW_PATHS[old]}`; the old name works until version 0.2."
    warnings.warn(message, FutureWarning, stacklevel=3)
    return PLACES[name]
