"""FIARSE: a client's sub-model consists of the server's largest weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import UNKNOWN, Algorithm, Known, Promises, Round, Setting
from lightning_spectral.algorithms.capacities import KeepRatios
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseSide, dense_mean
from lightning_spectral.arguments import Number, as_patterns, check_fields, check_matches, matches_any
from lightning_spectral.client.device import StepActions
from lightning_spectral.functional.checks import has_values, named_by_any
from lightning_spectral.functional.spectra import num_terms_for
from lightning_spectral.functional.zampling import pack_bits, unpack_bits
from lightning_spectral.nn.torch_modules import weight_hooks
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import apply_mean_change, load_tensors, select_tensors, travelling_tensors
from lightning_spectral.protocol.per_client import PerClient, check_entries
from lightning_spectral.protocol.records import Download, Receipt, Tensors, Upload, WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean

SHARE = Number(above=0, at_most=1, hint="it is the share of weights a client holds")
HELD = "held:"  # prefix to the name of a weight: one bit for each of its entries
THRESHOLDED = "_thresholded_weights"  # of a sub-model, in its `__dict__`


@dataclass(frozen=True)
class FIARSE(Algorithm):
    r"""Each client trains the largest weights of the server's model; all others are zero on the client.

    A client of keep ratio r gets the ceil(r m) weights of largest magnitude among all m weights of the module. Weights
    are the entries of trainable parameters of two or more dimensions; biases, normalisation layers and buffers are sent
    whole. The threshold :math:`\theta` is the smallest magnitude that was sent. In local training, weights below it are
    not used, and the gradient of the others is :math:`1 + 2\theta|w| / (|w| + \theta)^2` times that of a plain weight.
    Each entry is averaged over the clients that held it; entries held by no client are unchanged.

    Only traffic shrinks: the sub-model has the same shapes as the whole model. The download holds the values and one
    bit for each weight, held or not; the upload holds the values.

    Args:
        keep_ratio: Share r of the weights a client holds: one for all, ``{ratio: share of clients}`` or one per client.
        exclude: Patterns of the names of parameters that are sent whole.

    Note:
        The published code also masks the biases of linear layers and convolutions, and counts clients, whereas this
        class weighs them. With ``keep_ratio=1`` there is no threshold, and this is `FedAvg`, bit for bit.

    Reference:
        Wu et al. (2024), "FIARSE: Model-heterogeneous federated learning via importance-aware submodel extraction".

    Example:
        >>> FIARSE({0.25: 0.5, 1.0: 0.5}).masked_weights(nn.Linear(3, 2))
        ('weight',)
    """

    promises: ClassVar[Promises] = Promises(
        new_values=True, values_alone=True, parts_stay=True, any_steps=True, clients_may_join=True
    )

    keep_ratio: PerClient[float] = 0.25
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self, keep_ratio=partial(check_entries, rule=SHARE), exclude=as_patterns)

    def masked_weights(self, server: nn.Module) -> tuple[str, ...]:
        """Names of the parameters of which clients hold only the largest entries."""
        check_matches("exclude", self.exclude, dict(server.named_parameters(remove_duplicate=False)), "parameter")
        excluded = named_by_any(server, partial(matches_any, patterns=self.exclude))
        whole = {*normalised_weights(server), *excluded}
        return tuple(
            name
            for name, parameter in server.named_parameters()
            if parameter.requires_grad and parameter.dim() > 1 and name not in whole
        )

    def check(self, plan: Setting) -> None:
        if not self.masked_weights(server := plan.module):
            raise ValueError(
                f"FIARSE needs trainable weights of two or more dimensions that are not in `exclude`, and "
                f"{type(server).__name__} has none. Exclude fewer, or use FedAvg()."
            )

    @property
    def capacities(self) -> KeepRatios[FIARSE]:
        """A client of keep ratio r holds ceil(r m) of m weights."""
        return KeepRatios(
            self,
            self.keep_ratio,
            lambda server: [sum(server.get_parameter(name).numel() for name in self.masked_weights(server))],
        )

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> FIARSEHalf:
        """Decide which weights are cut; what is untrained, or stays with clients, is sent whole."""
        rules = known.rules
        whole = {*known.untrained} if rules is None else {*known.untrained, *rules.stays}
        return FIARSEHalf(server, [name for name in self.masked_weights(server) if name not in whole], rules)


class FIARSEHalf(DenseHalf):
    """FIARSE bound to a module; ``masked`` names the parameters of which clients hold only the largest entries."""

    def __init__(self, server: nn.Module, masked: Sequence[str], rules: BufferRules | None = None) -> None:
        super().__init__(server, rules)
        self.masked = tuple(masked)

    @property
    def client_side(self) -> FIARSESide:
        return FIARSESide(tuple(self.returned()))

    def open(self, cohort: Cohort) -> FIARSERound:
        return FIARSERound(self, cohort)


class FIARSERound(Round):
    """One open round.

    Attributes:
        tensors: Parameters and buffers of the server's module, by name.
        held: For each keep ratio and each weight, the ascending indices of the entries that are held.
        masked: Running mean over the entries of the weights.
        dense: Running mean of the tensors that all clients hold whole.
    """

    def __init__(self, half: FIARSEHalf, cohort: Cohort) -> None:
        before = dict(half.rules.averaged(half.returned()))
        weights = {name: before.pop(name) for name in half.masked}
        self.server, self.cohort = half.server, cohort
        self.tensors = travelling_tensors(half.server)
        self.held = {keep_ratio: largest_entries(weights, keep_ratio) for keep_ratio in cohort.groups}
        self.masked = MeanChange(weights, cohort.total, cohort.absolute, by_index=dict.fromkeys(weights))
        self.dense = dense_mean(half.server, before, cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        keep_ratio = self.cohort.capacity_of(unit)
        tensors = dict(self.tensors)
        if keep_ratio < 1:
            for name, entries in self.held[keep_ratio].items():
                whole = tensors[name].flatten()
                tensors[name] = whole[entries]
                bits = torch.zeros_like(whole, dtype=torch.bool).index_fill_(0, entries, True)
                tensors[HELD + name] = pack_bits(bits)
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio)

    def positions(self, receipt: Receipt) -> dict[str, Tensor]:
        return dict(self.held[receipt.capacity]) if receipt.capacity < 1 else {}

    def add(self, receipt: Receipt, upload: Upload) -> None:
        weight = receipt.unit.coefficient
        self.masked.add(upload.tensors, weight, upload.largest, where=self.held[receipt.capacity])
        self.dense.add(upload.tensors, weight, upload.largest)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.masked, self.dense]

    def close(self) -> None:
        apply_mean_change(self.server, self.dense.finish())
        apply_mean_change(self.server, self.masked.finish())


@torch.no_grad()
def largest_entries(weights: Mapping[str, Tensor], keep_ratio: float) -> dict[str, Tensor]:
    """Ascending flat indices of the ceil(r m) entries of largest magnitude among all m; of equal ones, the first.

    Of weights without values the first entries, which cost as much: as many are sent, if all weights have one type.

    Example:
        >>> largest_entries({"a": torch.tensor([[3.0, -1.0]]), "b": torch.tensor([1.0, -4.0])}, 0.75)
        {'a': tensor([0, 1]), 'b': tensor([1])}
    """
    if not all(map(has_values, weights.values())) and len({weight.dtype for weight in weights.values()}) == 1:
        left, found = num_terms_for(sum(weight.numel() for weight in weights.values()), keep_ratio), {}
        for name, weight in weights.items():
            found[name] = weight.new_empty(min(left, weight.numel()), dtype=torch.int64)
            left -= len(found[name])
        return found
    magnitudes = torch.cat([weight.abs().flatten() for weight in weights.values()])
    num_held = num_terms_for(len(magnitudes), keep_ratio)
    threshold = magnitudes.kthvalue(len(magnitudes) - num_held + 1).values
    held = magnitudes > threshold
    ties = (magnitudes == threshold).nonzero().squeeze(1)
    held[ties[: num_held - int(held.sum())]] = True
    parts = torch.split(held, [weight.numel() for weight in weights.values()])
    return {name: part.nonzero().squeeze(1) for name, part in zip(weights, parts, strict=True)}


class ThresholdedWeight:
    r"""A weight of which a step uses only the entries that are at least as large as a threshold.

    In the gradient of :math:`w\,[|w| \ge \theta]`, the derivative of the step function is taken to be
    :math:`2\theta / (|w| + \theta)^2` where the entry is used, and zero elsewhere. So entries near the threshold have
    up to 3/2 of the gradient.
    """

    def __init__(self, weight: nn.Parameter, held: Tensor, threshold: float) -> None:
        self.weight, self._held, self._threshold = weight, held, threshold
        self._below: Tensor | None = None  # the whole weight, while its small entries are zero

    @torch.no_grad()
    def use(self) -> None:
        """Set entries below the threshold to zero, until `restore`."""
        self.restore()
        self._below = self.weight.clone()
        self.weight.mul_(self._used())

    @torch.no_grad()
    def restore(self) -> None:
        if self._below is not None:
            self.weight.copy_(self._below)
            self._below = None

    @torch.no_grad()
    def correct_gradient(self) -> None:
        if self.weight.grad is not None:
            magnitude = self.weight.abs()
            whole = (magnitude + self._threshold).clamp(min=torch.finfo(magnitude.dtype).tiny)
            slope = 2 * (self._threshold / whole) * (magnitude / whole)
            self.weight.grad.mul_((1 + slope) * self._used())

    def _used(self) -> Tensor:
        return self._held & (self.weight.abs() >= self._threshold)


@dataclass(frozen=True)
class FIARSESide(DenseSide):
    """Models whose absent weights are zero and stay zero."""

    def load(self, client: nn.Module, download: Download) -> None:
        values = {name: tensor for name, tensor in download.tensors.items() if not name.startswith(HELD)}
        for name, held in held_entries(client, download.tensors).items():
            values[name] = torch.zeros_like(client.get_parameter(name)).masked_scatter_(held, values[name])
        load_tensors(client, values)

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        """Apply a threshold, the smallest magnitude sent, in each step; do nothing if the client holds all weights."""
        held = held_entries(client, download.tensors)
        sent = [download.tensors[name] for name in held if download.tensors[name].numel()]
        threshold = min((float(entries.abs().min()) for entries in sent if has_values(entries)), default=0.0)
        weights = [ThresholdedWeight(client.get_parameter(name), mask, threshold) for name, mask in held.items()]
        vars(client)[THRESHOLDED] = weights

        def use() -> None:
            for weight in weights:
                weight.use()

        def correct(optimizer: Optimizer) -> None:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for weight in weights:
                weight.restore()
                if id(weight.weight) in stepped:
                    weight.correct_gradient()

        return StepActions(use, correct) if weights else None

    def collect(self, client: nn.Module, download: Download) -> Upload:
        for weight in vars(client).pop(THRESHOLDED, ()):
            weight.restore()  # from a step that was begun but not taken
        tensors, held = select_tensors(client, self.returned), held_entries(client, download.tensors)
        for name, mask in held.items():
            whole, sent = tensors[name], download.tensors[name]
            tensors[name] = whole[mask] if has_values(whole) else whole.new_empty(sent.shape)
        return Upload(download.unit, tensors)


def held_entries(client: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """Which entries of its weights a client was sent, as booleans in their shapes; weights sent whole are left out."""
    packed = {n.removeprefix(HELD): bits for n, bits in tensors.items() if n.startswith(HELD)}
    shapes = {name: client.get_parameter(name).shape for name in packed}
    return {name: unpack_bits(bits, shapes[name].numel()).view(shapes[name]) for name, bits in packed.items()}


def normalised_weights(module: nn.Module) -> Iterator[str]:
    """Names of the parameters of torch's weight norms: directions, which cannot be zero, and their lengths.

    Example:
        >>> sorted(normalised_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
        ['parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    for path, part in module.named_modules():
        hooked = [hook.name for hook in weight_hooks(part) if isinstance(hook, WeightNorm)]
        own = {f"{name}{end}" for name in hooked for end in ("_g", "_v")}
        if isinstance(part, ParametrizationList) and any(isinstance(step, _WeightNorm) for step in part):
            own = {name for name, _ in part.named_parameters()}
        yield from (f"{path}.{name}" if path else name for name in own)
