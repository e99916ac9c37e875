"""SCAFFOLD and FedDyn: each client's device keeps a control variate, and the server the sum over all clients."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.base import Observed, Promises, Setting
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide, FedAvg, FedAvgHalf
from lightning_spectral.algorithms.filter import Unusable
from lightning_spectral.algorithms.memory.kept import ClientSum, entries_of
from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.device import StepActions
from lightning_spectral.nn.cost import Cost, CostsBesides
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import norm_of, wide
from lightning_spectral.protocol.records import Download, Options, Receipt, Tensors, Upload, WorkUnit
from lightning_spectral.sums import RunningMean, check_summable
from lightning_spectral.sums.exact_mean import largest_magnitudes, largest_within

# before the name of a parameter: the server's control in downloads, the client's own on its device
CONTROL = "control:"
# in what the server keeps of a client: the norm of its control before it was shortened, and whether it was
NORM, SHORTENED = "norm", "share:shortened"


def adding(addends: Mapping[nn.Parameter, Callable[[], Tensor]]) -> Callable[[Optimizer], None]:
    """An action before each step that adds to the gradients of some parameters, after the user's local hooks.

    A parameter that is not in the loss of a step has gradient zero.
    """

    @torch.no_grad()
    def add(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            sign = -1.0 if group.get("maximize") else 1.0  # it reverses the sign of gradients
            for parameter in group["params"]:
                if parameter.requires_grad and (addend := addends.get(parameter)) is not None:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(addend(), alpha=sign)

    return add


@dataclass(frozen=True)
class ControlSide(DenseSide):
    r"""Whole models, and a control :math:`c_i` for each parameter, which the client keeps and the server never sees.

    Both sides compute the same change of it, :math:`\delta c_i = a (x - y) - c`, from what the client was sent, which
    is x and perhaps a control c, and from what it sends back, y.

    Attributes:
        trained: Names of the parameters that have a control.
    """

    trained: tuple[str, ...] = field(kw_only=True)

    @abstractmethod
    def scale(self, options: Sequence[Sequence[Options]], upload: Upload) -> float:
        """The factor a of a turn; 0 if the client learns nothing, so that its control stays as it is.

        Args:
            options: `Download.options`, of which the server believes its own.
            upload: What the client sends back.
        """

    @abstractmethod
    def addends(self, client: nn.Module, download: Download) -> Mapping[nn.Parameter, Callable[[], Tensor]]:
        """What is added to the gradient of each of these parameters before a step."""

    @torch.no_grad()
    def changes(self, sent: Tensors, upload: Upload, scale: float) -> dict[str, Tensor]:
        """The change of a client's control in a turn, in at least single precision; empty if it learns nothing."""
        changes: dict[str, Tensor] = {}
        for name in self.trained if scale else ():
            changes[name] = (wide(sent[name]) - wide(upload.tensors[name])).mul_(scale)
            if (control := sent.get(f"{CONTROL}{name}")) is not None:
                changes[name].sub_(control)
        return changes

    def load(self, client: nn.Module, download: Download) -> None:
        tensors = {name: tensor for name, tensor in download.tensors.items() if not name.startswith(CONTROL)}
        super().load(client, replace(download, tensors=tensors))

    def start(self, client: nn.Module, download: Download) -> StepActions:
        return StepActions(before_step=adding(self.addends(client, download)))

    @torch.no_grad()
    def keep(self, client: nn.Module, download: Download, upload: Upload) -> Tensors:
        kept = dict(download.client_state)
        scale = self.scale(download.options, upload)
        for name, change in self.changes(download.tensors, upload, scale).items():
            own = download.client_state.get(f"{CONTROL}{name}")
            kept[f"{CONTROL}{name}"] = change if own is None else change.add_(own)
        return kept


class ControlHalf(FedAvgHalf):
    """Whole models whose clients have controls, bound to a module."""

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that have a control: all that are trained and shared."""
        own = self.rules.stays
        return tuple(name for name, p in self.server.named_parameters() if p.requires_grad and name not in own)

    @property
    def device_options(self) -> Mapping[str, Any]:
        return {**super().device_options, "trained": self.trained}

    @property
    def costs_besides(self) -> CostsBesides:
        return CostsBesides(Cost(held_bytes=sum(self.server.get_parameter(name).nbytes for name in self.trained)))


class ControlRound(DenseRound):
    """One open round in which clients have controls.

    Attributes:
        side: The device half.
        total: The sum of all clients' controls, weighted by their shares of the data, as the round opened.
        change: Running sum of its change.
        entries: What the server kept of the round's clients when it opened, if their controls are bounded.
    """

    def __init__(self, half: FedAvgHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        assert isinstance(half.state, ClientSum), "made by `new_state`"
        assert isinstance(half.client_side, ControlSide)
        assert isinstance(half.algorithm, WithControls)
        self.side, self.total, self.times = half.client_side, half.state, half.algorithm.control_bound
        self.change = self.total.change([*self.side.trained, *([SHORTENED] if self.times else [])], cohort)
        self.entries = entries_of(cohort) if self.times else {}

    def add(self, receipt: Receipt, upload: Upload) -> None:
        scale = self.side.scale(self.cohort.options, upload)
        if not scale and any(bool((upload.tensors[n] != self.tensors[n]).any()) for n in self.side.trained):
            raise Unusable("error", "SCAFFOLD divides by a client's steps, and it hides how many; use FedAvg")
        changes = self.side.changes(self.tensors, upload, scale)
        before, after = self.largest, upload.largest
        bounds = [scale * (before[n] + after[n]) + before.get(f"{CONTROL}{n}", 0.0) for n in self.side.trained]
        if scale:
            bound = max(bounds, default=0.0)
            check_summable(largest_within(bound, lambda: nn.utils.parameters_to_vector(changes.values())))
        super().add(receipt, upload)
        if changes:
            added = self.bounded(receipt.unit, changes) if self.times else changes
            self.change.add(added, self.cohort.shares[receipt.unit.key])

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """Largest magnitude of each tensor of the download that enters a change."""
        return largest_magnitudes(
            {n: t for n, t in self.tensors.items() if n.removeprefix(CONTROL) in self.side.trained}
        )

    @cached_property
    def longest(self) -> float:
        """The largest norm of a client's control, from those that the round's clients had when it opened."""
        norms = [float(entry[NORM]) for entry in self.entries.values()]
        return self.times * median(norms) if norms and self.times else inf

    @torch.no_grad()
    def bounded(self, unit: WorkUnit, changes: Tensors) -> Tensors:
        """The change of a client's control at the server, where it is no longer than others', and is kept."""
        device = self.total.values.device
        old = {name: tensor.to(device) for name, tensor in self.entries.get(unit.key, {}).items()}
        control = {name: change + old[name] if old else change for name, change in changes.items()}
        if is_shortened := (norm := norm_of(control.values())) > self.longest:
            control = {name: tensor * (self.longest / norm) for name, tensor in control.items()}
            changes = {name: tensor - old[name] if old else tensor for name, tensor in control.items()}
        number = self.total.values.new_tensor
        shortened = number(float(is_shortened))
        self.cohort.store[unit] = {**control, NORM: number(norm), SHORTENED: shortened}
        return {**changes, SHORTENED: shortened - old[SHORTENED] if old else shortened}

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, self.change]

    def close(self) -> None:
        super().close()
        self.total.add(self.change)

    def observed(self) -> Observed:
        pieces = self.total.pieces()
        shortened = {"controls_shortened": float(pieces.pop(SHORTENED))} if self.times else {}
        return Observed({"control_norm": float(nn.utils.parameters_to_vector(pieces.values()).norm()), **shortened})


@dataclass(frozen=True)
class WithControls(FedAvg):
    """Federated averaging whose clients have controls.

    Attributes:
        control_bound: The longest control of a client at the server, in medians; ``None`` for no bound.
    """

    half: ClassVar[type[FedAvgHalf]] = ControlHalf

    control_bound: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self, control_bound=Number(above=0, optional=True))

    def new_state(self, server: nn.Module, seed: int) -> ClientSum:
        shapes: dict[str, Sequence[int]] = {name: p.shape for name, p in server.named_parameters()}
        return ClientSum({**shapes, SHORTENED: ()} if self.control_bound else shapes)


UNLIKE = ("momentum", "dampening", "nesterov", "maximize")  # options that make a step something else


@dataclass(frozen=True)
class ScaffoldSide(ControlSide):
    """Whole models whose gradients are corrected by the server's control minus the client's own."""

    def scale(self, options: Sequence[Sequence[Options]], upload: Upload) -> float:
        distance = upload.num_steps * one_rate(group for groups in options for group in groups)
        return 1.0 / distance if distance else 0.0

    def addends(self, client: nn.Module, download: Download) -> Mapping[nn.Parameter, Callable[[], Tensor]]:
        def correction(control: str) -> Tensor:
            server, own = download.tensors[control], download.client_state.get(control)
            return server if own is None else server - own

        parameters = dict(client.named_parameters())
        return {parameters[name]: partial(correction, f"{CONTROL}{name}") for name in self.trained}


def one_rate(groups: Iterable[Options]) -> float:
    """The learning rate of all parameter groups, 0 if there are none; raise ``ValueError`` if there are several."""
    if len(rates := {float(group["lr"]) for group in groups}) > 1:
        raise ValueError(
            f"SCAFFOLD needs one learning rate for all parameters, got {', '.join(map(str, sorted(rates)))}; give all "
            "parameter groups the same, in every round."
        )
    return next(iter(rates), 0.0)


class ScaffoldRound(ControlRound):
    """One open round of SCAFFOLD: all clients are sent the server's control as well."""

    def __init__(self, half: FedAvgHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        controls = {n: t.to(self.tensors[n].dtype) for n, t in self.total.pieces().items() if n in self.side.trained}
        self.tensors = {**self.tensors, **{f"{CONTROL}{name}": control for name, control in controls.items()}}
        one_rate(group for groups in cohort.options for group in groups)


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
    is that of `FedAvg`. A device keeps as much as the trainable parameters take.

    What a device that lies adds to c stays there, and grows round after round. With ``control_bound`` b, the server
    keeps every client's control v itself, and shortens it to b times m, the median norm of those that the round's
    clients had before:

    .. math:: v_i \leftarrow (v_i + \delta c_i) \min\left(1, \frac{b\, m}{\|v_i + \delta c_i\|}\right), \qquad
        c = \sum_i d_i v_i .

    Args:
        control_bound: The bound b, for which the server needs the memory of the trainable parameters for each client;
            ``None`` for none. In the first round nothing is shortened.

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
        >>> heavy = torch.optim.SGD(line.parameters(), lr=0.1, momentum=0.9)
        >>> Scaffold().check(Setting(line, optimizers=[heavy]))
        Traceback (most recent call last):
        ValueError: SCAFFOLD needs plain SGD, got momentum=0.9; leave it out. A server may have momentum: FedAvgM.
    """

    side: ClassVar[type[DenseSide]] = ScaffoldSide
    round: ClassVar[type[DenseRound]] = ScaffoldRound
    promises: ClassVar[Promises] = Promises(new_values=True, same_tensors=True, parts_stay=True)

    def check(self, plan: Setting) -> None:
        """Raise ``ValueError`` unless one optimizer steps all trainable parameters by one rate times the gradient."""
        for template in plan.optimizers:
            self._check_optimizer(template, plan.module)

    def _check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
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
        one_rate(template.param_groups)
        held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
        if missing := [name for name, p in server.named_parameters() if p.requires_grad and id(p) not in held]:
            raise ValueError(
                "SCAFFOLD needs one optimizer for all trainable parameters, and yours does not step "
                f"{', '.join(missing)}; give it all of them, or freeze the others with `requires_grad_(False)`."
            )


@dataclass(frozen=True, kw_only=True)
class FedDynSide(ControlSide):
    """Whole models whose gradients are those of the regularised loss.

    Attributes:
        alpha: Strength of both terms.
    """

    alpha: float

    def scale(self, options: Sequence[Sequence[Options]], upload: Upload) -> float:
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
            if name in self.side.trained and (gradient := self.half.server.get_parameter(name).grad) is not None:
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
        control_bound: As for `Scaffold`: how long :math:`h_i` may be at the server.

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
    half: ClassVar[type[FedAvgHalf]] = FedDynHalf
    promises: ClassVar[Promises] = Promises(
        new_values=True, values_alone=True, same_tensors=True, parts_stay=True, any_steps=True
    )

    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, alpha=Number(above=0))
