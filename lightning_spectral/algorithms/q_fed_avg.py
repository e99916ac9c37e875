"""q-FedAvg: clients with larger losses count for more."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from lightning_spectral.algorithms.base import Promises, Setting
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide, FedAvg, FedAvgHalf, dense_mean
from lightning_spectral.algorithms.filter import Unusable
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import Receipt, Tensors, Upload
from lightning_spectral.sums import MeanChange, RunningMean, check_summable
from lightning_spectral.sums.exact_mean import largest_magnitudes

STEP = "step:"  # next to the parameters in the sum: what it is divided by
FINER = 2.0**10  # cancels, and keeps small powers of small losses above the sum's steps of 2^-50
LEAST_LOSS = 1e-10  # added to losses, whose powers may be negative, as the authors' code does


@dataclass(frozen=True)
class QFedAvgSide(DenseSide):
    """Whole models; uploads also have the loss at the downloaded weights."""

    reads_loss: ClassVar[bool] = True


class QFedAvgRound(DenseRound):
    """One open round of q-FedAvg.

    Attributes:
        mean: Running mean of the changes of what is not trained, such as buffers.
        trained: The trained parameters, as they were sent.
        steps: Running mean of what the round's clients would subtract from them, and of its divisor.
    """

    def __init__(self, half: FedAvgHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        assert isinstance(half.algorithm, QFedAvg)
        self.choice, before = half.algorithm, self.mean.before
        names = {name for name, p in half.server.named_parameters() if p.requires_grad} & before.keys()
        self.trained: Tensors = {name: tensor for name, tensor in before.items() if name in names}
        self.mean = dense_mean(half.server, {n: t for n, t in before.items() if n not in names}, cohort)
        one = next(iter(self.tensors.values())).new_zeros((), dtype=torch.float64)
        zeros = {name: one.expand(tensor.shape) for name, tensor in self.trained.items()}
        self.steps = MeanChange({**zeros, STEP: one}, cohort.total, cohort.absolute, always_divided=[STEP])

    @torch.no_grad()
    def summands(self, upload: Upload) -> dict[str, Tensor]:
        r"""A client's :math:`F^q (x - y)` and :math:`F^q + q F^{q-1} L \|x - y\|^2`, both `FINER`, float64."""
        moved = {name: tensor.double() - upload.tensors[name].double() for name, tensor in self.trained.items()}
        squares = sum((tensor.square().sum() for tensor in moved.values()), self.steps.before[STEP])
        q, loss = self.choice.q, torch.full_like(squares, upload.loss_before + LEAST_LOSS)  # powers of floats may raise
        power = FINER * loss**q
        step = power + FINER * q * loss ** (q - 1) * self.choice.lipschitz * squares
        return {**{name: tensor.mul_(power) for name, tensor in moved.items()}, STEP: step}

    def add(self, receipt: Receipt, upload: Upload) -> None:
        """Add a client's update; what is computed from it is not finite if it has sent no loss.

        Raises:
            Unusable: If its loss is negative.
        """
        if upload.loss_before < 0:
            raise Unusable(
                "error",
                f"q-FedAvg takes powers of losses, which must not be negative, got {upload.loss_before:g}; add a "
                "constant to the loss of `training_step`, or use FedAvg",
            )
        summands = self.summands(upload) if upload.num_steps else {}
        largest = largest_magnitudes(summands)
        check_summable(*largest.values())
        super().add(receipt, upload)
        if summands:
            self.steps.add(summands, receipt.unit.coefficient, largest)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, self.steps]

    def close(self) -> None:
        divisor = float(self.steps.change(STEP))

        def steps() -> Iterator[tuple[str, Tensor]]:
            for name in self.trained if divisor > 0 else ():
                yield name, self.steps.change(name).div_(-divisor).view_as(self.trained[name])

        apply_mean_change(self.half.server, chain(self.mean.finish(), steps()))


@dataclass(frozen=True)
class QFedAvg(FedAvg):
    r"""Federated averaging that gives clients with larger losses more weight.

    It minimises :math:`\sum_i \frac{d_i}{q + 1} F_i^{q + 1}`, where d is a client's share of the data and F its mean
    loss. Each client of a round sends its loss at the weights x that it was sent, and trains to :math:`y_i` as in
    `FedAvg`. With the clients' coefficients c, the server takes the step

    .. math:: x \leftarrow x - \frac{\sum_i c_i F_i^q \, (x - y_i)}{\sum_i c_i h_i}, \qquad
        h_i = F_i^q + q F_i^{q-1} L \, \|x - y_i\|^2.

    With q = 0 it is `FedAvg`; the larger q, the more equal clients' losses become, and the slower training is. Buffers
    are averaged as in `FedAvg`. Reading the loss takes a third of a local epoch, with dropout as in training.

    Args:
        q: Strength of fairness, at least 0. The paper uses 0.001 to 5.
        lipschitz: L, the Lipschitz constant of the gradient of the losses, positive. The paper takes 1 / learning
            rate of the clients' SGD. The more local steps a client takes, the longer its update and the shorter the
            server's step; so divide by the number of steps as well.

    Raises:
        ValueError: If the module uses manual optimisation, whose ``training_step`` would train when it is to measure.
        ClientError: While training, if a client's loss is negative and `Faults` ends the run on errors.

    Note:
        The paper draws clients by their shares and gives all of them the same c; here c are those of the sampler, by
        default numbers of examples. Coefficients of an unbiased sampler are divided by their sum in the denominator
        only. A client that reports too large a loss gets too large a weight: over a network, use this algorithm only
        among trusted clients.

    Reference:
        Li et al. (2020), Fair resource allocation in federated learning, Algorithm 2, with numerator and denominator
        divided by L.

    Example:
        >>> QFedAvg(q=1.0, lipschitz=10.0)
        QFedAvg(q=1.0, lipschitz=10.0)
    """

    side: ClassVar[type[DenseSide]] = QFedAvgSide
    round: ClassVar[type[DenseRound]] = QFedAvgRound
    promises: ClassVar[Promises] = Promises(
        new_values=True, same_tensors=True, parts_stay=True, any_steps=True, clients_may_join=True
    )

    q: float = 1.0
    lipschitz: float = 10.0

    def __post_init__(self) -> None:
        check_fields(
            self, q=Number(at_least=0), lipschitz=Number(above=0, hint="about 1 / learning rate for one local step")
        )

    def check(self, plan: Setting) -> None:
        if not getattr(plan.module, "automatic_optimization", True):
            raise ValueError(
                "q-FedAvg reads losses with `training_step`, which trains under manual optimisation; use automatic "
                "optimisation, or FedAvg."
            )
