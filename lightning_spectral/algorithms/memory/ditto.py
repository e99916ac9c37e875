"""Ditto: each client keeps a whole model of its own beside the shared one."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Promises
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide, FedAvg, FedAvgHalf
from lightning_spectral.algorithms.memory.controls import adding
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.device import StepActions
from lightning_spectral.nn.cost import Cost, CostsBesides
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, Tensors, Upload, num_bytes

OWN = "_ditto_own"  # attribute of a client: its own model, while it trains the shared one


@dataclass(frozen=True, kw_only=True)
class DittoSide(DenseSide):
    """Trains the client's own model first, and then the shared one.

    Attributes:
        pull: Strength with which the shared model attracts the client's own.
        own: Names of the tensors that the client's own model has: trained parameters, and buffers.
    """

    pull: float
    own: tuple[str, ...]

    def start(self, client: nn.Module, download: Download) -> Sequence[StepActions] | None:
        if download.local_epochs == 0:
            return None

        def towards(shared: Tensor, parameter: nn.Parameter) -> Tensor:
            return (parameter - shared).mul_(self.pull)

        def share() -> None:
            vars(client)[OWN] = {name: tensor.clone() for name, tensor in select_tensors(client, self.own).items()}
            load_tensors(client, download.tensors)

        parameters = {name: p for name, p in client.named_parameters() if name in self.own}
        pulls = adding({p: partial(towards, download.tensors[name], p) for name, p in parameters.items()})
        load_own = partial(load_tensors, client, self.own_model(download.client_state))
        return [StepActions(before_step=pulls, prepare=load_own), StepActions(prepare=share)]

    def keep(self, client: nn.Module, download: Download, upload: Upload) -> Tensors:
        own: Tensors = vars(client).pop(OWN, self.own_model(download.client_state))
        return own

    def own_model(self, client_state: Tensors) -> Tensors:
        return {name: client_state[name] for name in self.own if name in client_state}


class DittoHalf(FedAvgHalf):
    """Ditto, bound to a module."""

    algorithm: "Ditto"

    @property
    def device_options(self) -> Mapping[str, Any]:
        trained = [name for name, p in self.server.named_parameters() if p.requires_grad]
        own = (*trained, *(name for name, _ in self.server.named_buffers()))
        return {**super().device_options, "pull": self.algorithm.pull, "own": own}

    @property
    def costs_besides(self) -> CostsBesides:
        """The client's own model as it was before the turn, and as it is while the shared one trains."""
        return CostsBesides(Cost(held_bytes=2 * num_bytes(select_tensors(self.server, self.device_options["own"]))))


@dataclass(frozen=True)
class Ditto(FedAvg):
    r"""Federated averaging in which each client also trains a model of its own, close to the shared one.

    In its turn, a client takes as many local epochs for its own model v as for the shared one. v is trained by

    .. math:: \min_v L_i(v) + \frac{\lambda}{2} \|v - x\|^2

    from where it was after the client's last turn, with the user's optimizer; x are the weights that the client was
    sent. The shared model is trained and averaged as in `FedAvg`. v stays on the device, with its buffers, such as
    running averages. `ClientEvaluation` evaluates it as ``own/...``, and `FederatedModule.own_model` returns it. Turns
    take twice the time; what is sent is the same.

    Args:
        pull: :math:`\lambda`, in units of loss per squared parameter, at least 0: with 0, v is trained alone.

    Note:
        In its first turn v begins at x; the paper gives every client the initial weights of the run. Local epochs of
        the shared model follow those of v, and see the examples in another order. What clients log is the mean over
        both, whereas their loss is that of the shared model.

    Reference:
        Li et al. (2021), Ditto: fair and robust federated learning through personalization, Algorithm 1.

    Example:
        >>> Ditto(pull=0.5).bind(nn.BatchNorm1d(2)).client_side.own
        ('weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked')
    """

    side: ClassVar[type[DenseSide]] = DittoSide
    round: ClassVar[type[DenseRound]] = DenseRound
    half: ClassVar[type[FedAvgHalf]] = DittoHalf
    promises: ClassVar[Promises] = Promises(
        new_values=True,
        values_alone=True,
        same_tensors=True,
        one_sum=True,
        noise_hides=True,
        clients_may_join=True,
        remedies={"parts_stay": "use FedAvg, since Ditto's clients keep a whole model of their own"},
    )

    pull: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self, pull=Number(at_least=0))
