"""Names that were at the top level in 0.1, and are now found in the packages; until 0.2 they work, with a warning."""

import warnings
from types import FrameType

MOVED = {
    "algorithms": """
        AdapterAggregation MatrixMeans SpectralStart TermAggregation TermMeans spectral_start
    """,
    "client": "GradientClip LocalHook MaskedLogits ProximalTerm",
    "designs": "Coordinated Design JointDesign RandomSystematic",
    "errors": "LostProcessError RoundError",
    "functional": "standardize_images",
    "functional.zampling": "Clip Link Sigmoid",
    "nn": """
        CostTable FrobeniusDecay WidthPlan unzample width_plan zample
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
REPLACED = """
    LoRACostTable ZamplingCostTable compression_for keep_ratio_for lora_cost_table rank_for sub_model_cost_table
    sub_model_keep_ratio_for zampling_cost_table
"""  # by others, which they name when they are called
PLACES = {name: f"lightning_spectral.{place}" for place, names in MOVED.items() for name in names.split()}
OLD_COSTS = dict.fromkeys(REPLACED.split(), "lightning_spectral.algorithms.old_costs")
NEW_PATHS = {f"lightning_spectral.{name}": f"{place}.{name}" for name, place in PLACES.items()}


def is_old_name(name: str, caller: FrameType) -> bool:
    """Whether a name was at the top level, unless jsonargparse looks for the path that it will write into configs."""
    return (name in PLACES or name in OLD_COSTS) and caller.f_code.co_name != "get_import_path"


def new_place(name: str) -> str:
    """Where an old name is found now; whoever reads it at the top level of the package is told."""
    if name in OLD_COSTS:
        return OLD_COSTS[name]
    old = f"lightning_spectral.{name}"
    message = f"`{old}` is now `{NEW_PATHS[old]}`; the old name works until version 0.2."
    warnings.warn(message, FutureWarning, stacklevel=3)
    return PLACES[name]
