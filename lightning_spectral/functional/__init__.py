"""The mathematics as plain functions on tensors: no modules, no Lightning, no global random state."""

from lightning_spectral.functional import zampling as zampling
from lightning_spectral.functional.figures.discrepancy import (
    cohort_discrepancy,
    coordinated_discrepancy,
    expected_coverage,
    group_discrepancy,
)
from lightning_spectral.functional.figures.effective_rank import (
    entropy_rank,
    marginal_entropy,
    participation_rank,
    stable_rank,
)
from lightning_spectral.functional.figures.fairness import decile_means, gini_coefficient, jain_index
from lightning_spectral.functional.figures.participation import (
    sampled_update_variance,
    sampled_variance,
    step_size_variance,
)
from lightning_spectral.functional.images import standardize_images
from lightning_spectral.functional.sampling.assignment import assignment_probs, model_joint_probs
from lightning_spectral.functional.sampling.brewer import draw_brewer
from lightning_spectral.functional.sampling.cohorts import (
    coordinated_multipliers,
    draw_coordinated,
    joint_discrepancy,
    joint_multipliers,
)
from lightning_spectral.functional.sampling.conditional_poisson import (
    draw_conditional_poisson,
    fit_conditional_poisson,
    poisson_conditional_inclusion_probs,
)
from lightning_spectral.functional.sampling.few_samples import (
    draw_from_support,
    draw_systematic,
    minimum_support,
    support_joint_probs,
    systematic_support,
)
from lightning_spectral.functional.sampling.inclusion import (
    collective_inclusion_probs,
    collective_multipliers,
    proportional_inclusion_probs,
    schatten_inclusion_probs,
    top_inclusion_probs,
)
from lightning_spectral.functional.sampling.joint import conditional_poisson_joint_probs, successive_joint_probs
from lightning_spectral.functional.sampling.successive_sampling import (
    draw_successive,
    fit_log_sizes,
    manly_inclusion_probs,
    successive_inclusion_probs,
)

__all__ = [
    "assignment_probs",
    "cohort_discrepancy",
    "collective_inclusion_probs",
    "collective_multipliers",
    "conditional_poisson_joint_probs",
    "coordinated_discrepancy",
    "coordinated_multipliers",
    "decile_means",
    "draw_brewer",
    "draw_conditional_poisson",
    "draw_coordinated",
    "draw_from_support",
    "draw_successive",
    "draw_systematic",
    "entropy_rank",
    "expected_coverage",
    "fit_conditional_poisson",
    "fit_log_sizes",
    "gini_coefficient",
    "group_discrepancy",
    "jain_index",
    "joint_discrepancy",
    "joint_multipliers",
    "manly_inclusion_probs",
    "marginal_entropy",
    "minimum_support",
    "model_joint_probs",
    "participation_rank",
    "poisson_conditional_inclusion_probs",
    "proportional_inclusion_probs",
    "sampled_update_variance",
    "sampled_variance",
    "schatten_inclusion_probs",
    "stable_rank",
    "standardize_images",
    "step_size_variance",
    "successive_inclusion_probs",
    "successive_joint_probs",
    "support_joint_probs",
    "systematic_support",
    "top_inclusion_probs",
]
