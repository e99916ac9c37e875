"""FIARSE: a client's sub-model consists of the server's largest weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from lightning_spectral.algorithms.base import ByKeepRatio
from lightning_spectral.algorithms.fiarse.server import FIARSEHalf
from lightning_spectral.arguments import Number, as_patterns, check_fields, check_matches, matches_any
from lightning_spectral.nn.torch_hooks import normalised_weights
from lightning_spectral.protocol.buffer_rules import Rules, as_rules, buffer_rules
from lightning_spectral.protocol.per_client import PerClient, check_per_client

SHARE = Number(above=0, at_most=1, hint="it is the share of weights a client holds")


@dataclass(frozen=True)
class FIARSE(ByKeepRatio):
    r"""Each client trains the largest weights of the server's model; all others are zero on the client.

    A client of keep ratio r gets the ceil(r m) weights of largest magnitude among all m weights of the module. Weights
    are the entries of trainable parameters of two or more dimensions; biases, normalisation layers and buffers travel
    whole. The threshold :math:`\theta` is the smallest magnitude that was sent. In local training, weights below it are
    not used, and the gradient of the others is :math:`1 + 2\theta|w| / (|w| + \theta)^2` times that of a plain weight.
    Each entry is averaged over the clients that held it; entries held by no client are unchanged.

    Only traffic shrinks: the sub-model has the same shapes as the whole model. The download holds the values and one
    bit for each weight, held or not; the upload holds the values.

    Args:
        keep_ratio: Share r of the weights a client holds: one for all, ``{ratio: share of clients}`` or one per client.
        exclude: Patterns of the names of parameters that travel whole.
        buffers: Rules for buffers by patterns of their names, as in `FedAvg`.

    Note:
        The published code also masks the biases of linear layers and convolutions, and counts clients, whereas this
        class weighs them. With ``keep_ratio=1`` there is no threshold, and this is `FedAvg`, bit for bit.

    Reference:
        Wu et al. (2024), "FIARSE: Model-heterogeneous federated learning via importance-aware submodel extraction".

    Example:
        >>> FIARSE({0.25: 0.5, 1.0: 0.5}).masked_weights(nn.Linear(3, 2))
        ('weight',)
    """

    updates_have_norms: ClassVar[bool] = True

    keep_ratio: PerClient[float] = 0.25
    exclude: Sequence[str] = ()
    buffers: Rules = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_per_client, rule=SHARE),
            exclude=as_patterns,
            buffers=as_rules,
        )

    def masked_weights(self, server: nn.Module) -> tuple[str, ...]:
        """Names of the parameters of which clients hold only the largest entries."""
        check_matches("exclude", self.exclude, (name for name, _ in server.named_parameters()), "parameter")
        whole = set(normalised_weights(server))
        return tuple(
            name
            for name, parameter in server.named_parameters()
            if parameter.requires_grad
            and parameter.dim() > 1
            and name not in whole
            and not matches_any(name, self.exclude)
        )

    def check(self, server: nn.Module) -> None:
        if not self.masked_weights(server):
            raise ValueError(
                f"FIARSE needs trainable weights of two or more dimensions that are not in `exclude`, and "
                f"{type(server).__name__} has none. Exclude fewer, or use FedAvg()."
            )

    def cut_sizes(self, server: nn.Module) -> set[int]:
        """The number m of weights: a client of keep ratio r holds ceil(r m) of them."""
        return {sum(server.get_parameter(name).numel() for name in self.masked_weights(server))}

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> FIARSEHalf:
        """Decide which weights are cut, and the rules of buffers; what is untrained travels whole."""
        masked = [name for name in self.masked_weights(server) if name not in untrained]
        return FIARSEHalf(server, masked, buffer_rules(server, self.buffers, decisions))
