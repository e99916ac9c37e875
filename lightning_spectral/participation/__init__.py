"""Which clients take part in a round."""

from lightning_spectral.participation.base import Participation
from lightning_spectral.participation.uniform import UniformParticipation

__all__ = ["Participation", "UniformParticipation"]
