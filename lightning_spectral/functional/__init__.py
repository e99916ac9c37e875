"""The mathematics as plain functions on tensors: no modules, no Lightning, no global random state."""

from lightning_spectral.functional.conditional_poisson import (
    draw_conditional_poisson,
    fit_conditional_poisson,
    poisson_conditional_inclusion_probs,
)
from lightning_spectral.functional.diagnostics import marginal_entropy
from lightning_spectral.functional.inclusion import (
    collective_inclusion_probs,
    collective_multipliers,
    proportional_inclusion_probs,
    top_inclusion_probs,
)
from lightning_spectral.functional.successive_sampling import (
    draw_successive,
    fit_log_sizes,
    successive_inclusion_probs,
)

__all__ = [
    "collective_inclusion_probs",
    "collective_multipliers",
    "draw_conditional_poisson",
    "draw_successive",
    "fit_conditional_poisson",
    "fit_log_sizes",
    "marginal_entropy",
    "poisson_conditional_inclusion_probs",
    "proportional_inclusion_probs",
    "successive_inclusion_probs",
    "top_inclusion_probs",
]
