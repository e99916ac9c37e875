"""FedDyn: a linear and a quadratic term make the clients' optima agree with that of all of them."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide
from lightning_spectral.algorithms.memory.controls import CONTROL, ControlHalf, ControlRound, ControlSide, WithControls
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.protocol.records import Download, Upload


@dataclass(frozen=True, kw_only=True)
class FedDynSide(ControlSide):
    """Whole models whose gradients are those of the regularised loss.

    Attributes:
        alpha: Strength of both terms.
    """

    alpha: float

    def scale(self, upload: Upload) -> float:
        return self.alpha

    def addends(self, client: nn.Module, download: Download) -> Mapping[nn.Parameter, Callable[[], Tensor]]:
        def regularised(name: str, parameter: nn.Parameter) -> Tensor:
            pull, own = (parameter - download.tensors[name]).mul_(self.alpha), f"{CONTROL}{name}"
            return pull.sub_(download.client_state[own]) if own in download.client_state else pull

        parameters = dict(client.named_parameters())
        return {parameters[name]: partial(regularised, name, parameters[name]) for name in self.trained}


class FedDynHalf(ControlHalf):
    """FedDyn, bound to a module."""

    algorithm: "FedDyn"

    @property
    def device_options(self) -> Mapping[str, Any]:
        return {**super().device_options, "alpha": self.algorithm.alpha}


class FedDynRound(ControlRound):
    """One open round of FedDyn."""

    half: FedDynHalf

    @torch.no_grad()
    def close(self) -> None:
        super().close()
        for name, control in self.total.pieces().items():
            if (gradient := self.half.server.get_parameter(name).grad) is not None and name in self.change.names:
                gradient.add_(control, alpha=1.0 / self.half.algorithm.alpha)


@dataclass(frozen=True)
class FedDyn(WithControls):
    r"""Federated averaging in which clients minimise a loss whose optimum is that of all data.

    A client minimises, with its own optimizer and from the server's weights x,

    .. math:: L_i(w) - \langle h_i, w \rangle + \frac{\alpha}{2} \|w - x\|^2,

    and arrives at :math:`w_i`. Then it sets :math:`h_i \leftarrow h_i - \alpha (w_i - x)`, which is the gradient of its
    loss where it arrived, if that is a minimum. The server keeps the sum over all clients,
    :math:`h = \sum_i d_i h_i`, where d is a client's share of all examples, and corrects the average of the round's
    clients A by it:

    .. math:: h \leftarrow h - \alpha \sum_{i \in A} d_i (w_i - x), \qquad
        x \leftarrow \frac{\sum_{i \in A} n_i w_i}{\sum_{i \in A} n_i} - \frac{h}{\alpha}.

    All of them start at zero. :math:`h_i` stays on the client's device (`ClientSide.keep`), and only models are
    sent, as in `FedAvg`. A client needs the memory of its trainable parameters once more.

    The server steps along h even if no client learns anything in a round, as with momentum. Many local steps make h
    exact; a small alpha makes :math:`h / \alpha` large, so increase it if the loss explodes.

    Args:
        alpha: Strength of both terms, in units of loss per squared parameter, positive. The paper uses 0.001 to 0.1.

    Note:
        The paper gives all clients the same share. Here shares follow numbers of examples, as in `Scaffold`. What a
        device loses, or an `UpdateBound` takes from an update, stays in h, as in `Scaffold`.

    Reference:
        Acar et al. (2021), Federated learning based on dynamic regularization, Algorithm 1.

    Example:
        >>> FedDyn(alpha=0.1).bind(nn.Linear(2, 1), FedDyn(alpha=0.1).new_state(nn.Linear(2, 1), seed=0)).trained
        ('weight', 'bias')
    """

    side: ClassVar[type[DenseSide]] = FedDynSide
    round: ClassVar[type[DenseRound]] = FedDynRound
    half: ClassVar[type[DenseHalf]] = FedDynHalf
    updates_have_norms: ClassVar[bool] = True

    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, alpha=Number(above=0))
