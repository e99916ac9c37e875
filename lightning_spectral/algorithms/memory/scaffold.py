"""SCAFFOLD: control variates correct the drift of clients in every local step."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide
from lightning_spectral.algorithms.memory.controls import CONTROL, ControlRound, ControlSide, WithControls
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, Upload

LEARNING_RATE = "learning_rate:"  # of the round; sent back because the server needs it
UNLIKE = ("momentum", "dampening", "nesterov", "maximize")  # options that make a step something else


@dataclass(frozen=True)
class ScaffoldSide(ControlSide):
    """Whole models whose gradients are corrected by the server's control minus the client's own."""

    def scale(self, upload: Upload) -> float:
        distance = upload.num_steps * float(upload.tensors[LEARNING_RATE])
        return 1.0 / distance if distance else 0.0

    def addends(self, client: nn.Module, download: Download) -> Mapping[nn.Parameter, Callable[[], Tensor]]:
        def correction(control: str) -> Tensor:
            server, own = download.tensors[control], download.client_state.get(control)
            return server if own is None else server - own

        parameters = dict(client.named_parameters())
        return {parameters[name]: partial(correction, f"{CONTROL}{name}") for name in self.trained}

    def collect(self, client: nn.Module, download: Download) -> Upload:
        upload = super().collect(client, download)
        rates = {float(group["lr"]) for groups in download.options for group in groups}
        check_one_rate(rates)
        device = next(iter(upload.tensors.values())).device
        rate = torch.tensor(next(iter(rates), 0.0), dtype=torch.float64, device=device)
        return replace(upload, tensors={**upload.tensors, LEARNING_RATE: rate})


def check_one_rate(rates: set[float]) -> None:
    """Raise ``ValueError`` if there are several learning rates."""
    if len(rates) > 1:
        raise ValueError(
            f"SCAFFOLD needs one learning rate for all parameters, got {', '.join(map(str, sorted(rates)))}; give all "
            "parameter groups the same, in every round."
        )


class ScaffoldRound(ControlRound):
    """One open round of SCAFFOLD: all clients are sent the server's control as well."""

    def __init__(self, half: DenseHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        controls = {n: t.to(self.tensors[n].dtype) for n, t in self.total.pieces().items() if n in self.change.names}
        self.tensors = {**self.tensors, **{f"{CONTROL}{name}": control for name, control in controls.items()}}


@dataclass(frozen=True)
class Scaffold(WithControls):
    r"""Federated averaging in which clients add :math:`c - c_i` to their gradients, so that they do not drift apart.

    A client's control :math:`c_i` is the mean gradient over the local steps of its last turn, before correction. The
    server's control is :math:`c = \sum_i d_i c_i` over all clients, where d is a client's share of all examples, the
    same in every round. All controls start at zero. After K local steps with learning rate :math:`\eta`, from x to y,

    .. math:: c_i \leftarrow c_i - c + \frac{x - y}{K \eta}, \qquad c \leftarrow c + \sum_{i \in A} d_i \, \delta c_i,

    where the sum is over the round's clients A. A client's control stays on its device (`ClientSide.keep`); the server
    computes its change from the upload, and stores c alone. The server's weights are updated as in `FedAvg`. Clients
    need plain SGD. Weight decay is allowed and counts as part of the gradient. So do changes that local hooks make to
    gradients, because the correction is added after them. A parameter that is not in a step's loss has gradient zero. A
    client that takes no step, has learning rate 0 or is left out keeps its control.

    A download holds the model and the server's control, which doubles its size if all parameters are trained. An upload
    is that of `FedAvg` plus the learning rate, 8 bytes. A device keeps as much as the trainable parameters take.

    Note:
        c is the sum of the clients' controls as long as no device loses one. A device that does begins again at zero,
        and c keeps what the lost control had added, for the rest of the run. It differs as well if an `UpdateBound`
        shortens an update, because the server computes with the shortened one. Keep states on disk:
        ``ClientData(..., state_folder=...)``.

        The new control is the paper's option II. K counts steps, whereas some implementations count epochs. With
        gradient scaling (``precision="16-mixed"``) K includes steps that are skipped because a gradient overflowed, so
        the controls of such rounds are too small.

    Reference:
        Karimireddy et al. (2020), SCAFFOLD, Algorithm 1 and equation (4), where all shares are 1/N.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> Scaffold().check_optimizer(torch.optim.SGD(line.parameters(), lr=0.1, momentum=0.9), line)
        Traceback (most recent call last):
        ValueError: SCAFFOLD needs plain SGD, got momentum=0.9; leave it out. A server may have momentum: FedAvgM.
    """

    side: ClassVar[type[DenseSide]] = ScaffoldSide
    round: ClassVar[type[DenseRound]] = ScaffoldRound

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal_epochs:
            raise ValueError(
                "SCAFFOLD divides by the number of a client's steps, so all of them must train the shared parameters; "
                f"leave out `personal_epochs={self.personal_epochs}`."
            )

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Raise ``ValueError`` unless one optimizer steps all trainable parameters by one rate times the gradient."""
        if type(template) is not SGD:
            raise ValueError(
                f"SCAFFOLD needs plain SGD, got {type(template).__name__}; use torch.optim.SGD without momentum, and "
                "an adaptive optimizer at the server, e.g. FedAdam."
            )
        for name, value in ((name, group[name]) for group in template.param_groups for name in UNLIKE):
            if value:
                raise ValueError(
                    f"SCAFFOLD needs plain SGD, got {name}={value!r}; leave it out. A server may have momentum: "
                    "FedAvgM."
                )
        check_one_rate({float(group["lr"]) for group in template.param_groups})
        held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
        if missing := [name for name, p in server.named_parameters() if p.requires_grad and id(p) not in held]:
            raise ValueError(
                "SCAFFOLD needs one optimizer for all trainable parameters, and yours does not step "
                f"{', '.join(missing)}; give it all of them, or freeze the others with `requires_grad_(False)`."
            )
