"""Spectral model sharding: clients train sampled singular terms of every affine layer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import ASGD, SGD, AdamW, Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.spectral_round import LayerRound, SpectralRound, open_layer
from lightning_spectral.client.local_optimizer import LocalOptimizer, rebuild_optimizer
from lightning_spectral.designs import Design
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.functional.factors import check_granularity, singular_terms
from lightning_spectral.functional.local_training import check_tau
from lightning_spectral.nn.layers.blocks import WeightBlock, as_rows, assemble, by_parameter
from lightning_spectral.nn.optimizer_hooks import EffectiveLRClip, FrobeniusDecay
from lightning_spectral.nn.plan.planner import check_undecided, plan_layers
from lightning_spectral.nn.plan.report import LayerReport
from lightning_spectral.nn.plan.swap import sharded_layers, swap_layers
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    load_tensors,
    select_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.per_client import KeepRatio, assign_keep_ratios, check_keep_ratios
from lightning_spectral.protocol.records import Cohort, Download, Upload
from lightning_spectral.protocol.statistics import MeanChange, RunningMean
from lightning_spectral.sharding import Collective, ShardingStrategy


@dataclass(frozen=True)
class SpectralSharding(Algorithm[SpectralRound]):
    """Each client trains ceil(r N) sampled singular terms of every affine layer, and the rest of the model whole.

    Args:
        strategy: Turns a layer's singular values into inclusion probabilities and multipliers.
        keep_ratio: Share r of the terms a client holds: one for all; ``{ratio: share of clients}``; or one per client.
        design: Draws terms with those probabilities; ``None`` for the strategy's own (conditional Poisson sampling;
            for PriSM successive sampling, the rule of its paper).
        clip_tau: Bound on a term's effective learning rate, in units of the nominal one; ``float("inf")`` for none.
            Exact for SGD; adaptive optimizers undo it, and a `SpectralWarning` says so.
        frobenius_decay: Coefficient lambda of the penalty ``lambda / 2 ||W_hat||_F^2`` on each sharded layer. The
            ``weight_decay`` of the user's optimizer never acts on the factors: it is added here.
        exclude: Shell-style patterns of layer names that stay dense.
        split: From a pattern of layer names to the number of linear layers packed into each, e.g. ``{"*.qkv": 3}``.
        keep_first_and_last_dense: Keep the first and the last layer dense, as the papers do.
        keep_buffers: Patterns of buffer names that keep the server's value instead of the clients' average.
        term_granularity: Round numbers of terms up to a multiple of this: 16 often takes no more time than 7.
        weigh_clients: Tell the strategy Kish's effective number of clients, which counts clients with more examples
            for more, in place of their number.
        plan: What `validate` returned, to fix the treatment of every layer; ``None`` to decide when training starts,
            with a traced forward pass if the module has an ``example_input_array``.

    Raises:
        ValueError: If a ratio is outside (0, 1], shares do not sum to 1, ``clip_tau`` is below 1,
            ``frobenius_decay`` is negative, or ``plan`` comes with choices that it has already made.

    Note:
        Clients of different keep ratios form groups; each group's probabilities are computed for the number of its
        clients in this round, as the 2024 paper does.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1.

    Example:
        >>> SpectralSharding(Collective(), keep_ratio={0.2: 0.6, 0.4: 0.4}).keep_ratio
        {0.2: 0.6, 0.4: 0.4}
    """

    strategy: ShardingStrategy = field(default_factory=Collective)
    keep_ratio: KeepRatio = 0.2
    design: Design | None = None
    clip_tau: float = 10.0
    frobenius_decay: float = 1e-4
    exclude: Sequence[str] = ()
    split: Mapping[str, int] = field(default_factory=dict)
    keep_first_and_last_dense: bool = True
    keep_buffers: Sequence[str] = ()
    term_granularity: int = 1
    weigh_clients: bool = False
    plan: LayerReport | None = None

    def __post_init__(self) -> None:
        check_keep_ratios(self.keep_ratio)
        check_tau(self.clip_tau)
        check_is("strategy", self.strategy, ShardingStrategy)
        if self.design is not None:
            check_is("design", self.design, Design)
        if not self.frobenius_decay >= 0.0:
            raise ValueError(f"`frobenius_decay` must be at least 0, got {self.frobenius_decay!r}.")
        check_granularity(self.term_granularity)
        if self.plan is not None:
            check_undecided(self.exclude, self.split, self.keep_first_and_last_dense)

    def keep_ratios(self, num_clients: int, seed: int) -> Tensor:
        """Keep ratio of every client, shape ``(num_clients,)``: exact shares, drawn from the seed."""
        return assign_keep_ratios(self.keep_ratio, num_clients, seed)

    def report(self, server: nn.Module) -> LayerReport:
        """The treatment of every layer of ``server``.

        Raises:
            ValueError: With every problem at once.
        """
        if self.plan is not None:
            return self.plan.check()
        return plan_layers(
            server,
            exclude=self.exclude,
            split=self.split,
            keep_first_and_last_dense=self.keep_first_and_last_dense,
            keep_buffers=self.keep_buffers,
        ).check()

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if ``server`` cannot be sharded, or ``plan`` is that of another module."""
        report, own = self.report(server), dict(server.named_parameters())
        if missing := [name for name in report.sharded_weights if name not in own]:
            raise ValueError(f"`plan` is that of another module: this one has no weights {', '.join(missing)}.")
        for name, blocks in by_parameter(list(report.blocks.values())):
            planned = blocks[-1].rows[1], blocks[0].shape[1]
            if (found := tuple(as_rows(own[name], blocks[0].transposed).shape)) != planned:
                raise ValueError(f"`plan` is that of another module: {name} is {found} as a matrix, not {planned}.")

    def prepare(self, server: nn.Module) -> SpectralSharding:
        """This algorithm with the treatment of every layer decided, once for all rounds."""
        if self.plan is not None:
            return self
        report = self.report(server)
        return replace(self, plan=report, exclude=(), split={}, keep_first_and_last_dense=True)

    def check_optimizer(self, template: Optimizer) -> None:
        """Say where the optimizer's weight decay goes, and which optimizers undo the clip."""
        if math.isfinite(self.clip_tau) and not isinstance(template, SGD | ASGD):
            warnings.warn(
                f"clip_tau={self.clip_tau:g} bounds effective learning rates by scaling gradients, which is exact for "
                f"SGD, with or without momentum; {type(template).__name__} rescales gradients by their own history, "
                "which undoes it. Use SGD, or clip_tau=float('inf') to do without.",
                SpectralWarning,
                stacklevel=2,
            )
        if decays := sorted({group["weight_decay"] for group in template.param_groups if group.get("weight_decay")}):
            listed = ", ".join(f"{decay:g}" for decay in decays)
            warnings.warn(
                f"weight_decay={listed} of {type(template).__name__} does not act on the factors of sharded layers; "
                f"it is added to their Frobenius decay of {self.frobenius_decay:g}.",
                SpectralWarning,
                stacklevel=2,
            )

    def build(self, server: nn.Module, keep_ratio: float) -> nn.Module:
        """A copy of ``server`` whose sharded layers hold ceil(r N) terms, empty until `load`."""
        report = self.report(server)
        # The dense weights that are about to be replaced are not worth copying: they stand for themselves in the copy.
        weights = [server.get_parameter(name) for name in report.sharded_weights]
        client = copy.deepcopy(server, {id(weight): weight for weight in weights})
        swap_layers(client, report, lambda kind, dense, n: kind.like(dense, n), keep_ratio, self.term_granularity)
        return client

    def local_optimizer(self, template: Optimizer, server: nn.Module, client: nn.Module) -> LocalOptimizer:
        """The user's optimizer with factors in groups without weight decay, Frobenius decay, then clipping."""
        blocks = self.report(server).blocks
        factors = {f"{name}.{factor}": block.parameter for name, block in blocks.items() for factor in ("u", "v")}
        local = rebuild_optimizer(
            template,
            server,
            client,
            origin=lambda name: factors.get(name, name),
            overrides=lambda name: {"weight_decay": 0.0} if name in factors else {},
        )
        decoupled = isinstance(template, AdamW) or any(g.get("decoupled_weight_decay") for g in template.param_groups)
        FrobeniusDecay(self._decays(template, server, blocks), decoupled).register(local.optimizer, client)
        EffectiveLRClip(self.clip_tau).register(local.optimizer, client)
        return local

    def _decays(self, template: Optimizer, server: nn.Module, blocks: Mapping[str, WeightBlock]) -> dict[str, float]:
        decay_of = {id(p): g.get("weight_decay", 0.0) for g in template.param_groups for p in g["params"]}
        weights = {name: id(server.get_parameter(block.parameter)) for name, block in blocks.items()}
        return {name: self.frobenius_decay + decay_of[key] for name, key in weights.items() if key in decay_of}

    def watched(self, client: nn.Module) -> Mapping[str, nn.Parameter]:
        """The left factor of every sharded matrix."""
        return {name: layer.u for name, layer in sharded_layers(client).items()}

    def refresh(self, server: nn.Module, cohort: Cohort) -> SpectralRound:
        """Factorise every sharded matrix once; inclusion probabilities and multipliers for each keep ratio."""
        report = self.report(server)
        matrices = [(n, b.matrix(server.get_parameter(b.parameter).detach())) for n, b in report.blocks.items()]
        terms = cohort.processes.share_out(matrices, _singular_terms, _decomposition_cost)
        layers = {name: self._open(name, found, cohort) for (name, _), found in zip(matrices, terms, strict=True)}
        averaged = averaged_tensors(server, report.sharded_weights, [*self.keep_buffers, *report.kept_buffers])
        mean = MeanChange(averaged, cohort.total_weight)
        return SpectralRound(layers, travelling_tensors(server, report.sharded_weights), mean)

    def _open(self, name: str, terms: tuple[Tensor, ...], cohort: Cohort) -> LayerRound:
        sizes = {
            keep_ratio: cohort.effective_size(clients) if self.weigh_clients else float(len(clients))
            for keep_ratio, clients in cohort.groups.items()
        }
        with _blamed(name):
            return open_layer(name, terms, self.strategy, self.design, cohort, sizes, granularity=self.term_granularity)

    def sample(self, round_state: SpectralRound, keep_ratio: float, key: tuple[Any, ...]) -> Download:
        """Draw the client's terms of every layer, independently."""
        tensors, terms = dict(round_state.tensors), {}
        for name, layer in round_state.layers.items():
            terms[name], parts = layer.draw(keep_ratio, key)
            tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        return Download(keep_ratio, tensors, terms)

    def load(self, client: nn.Module, download: Download) -> None:
        """Overwrite terms, multipliers and dense tensors in place."""
        load_tensors(client, download.tensors)

    def collect(self, round_state: SpectralRound, client: nn.Module, num_examples: int) -> Upload:
        """The trained factors and dense tensors; multipliers stay."""
        factors = [f"{name}.{factor}" for name in round_state.layers for factor in ("u", "v")]
        return Upload(select_tensors(client, [*round_state.mean.names, *factors]), num_examples)

    def add(self, round_state: SpectralRound, download: Download, upload: Upload) -> None:
        """Add the client's change: dense tensors whole, sharded layers term by term."""
        round_state.mean.add(upload.tensors, upload.num_examples, upload.largest)
        for name, layer in round_state.layers.items():
            u, v = f"{name}.u", f"{name}.v"
            magnitudes = upload.largest[u], upload.largest[v]
            trained = upload.tensors[u], upload.tensors[v]
            layer.mean.add(download.terms[name], *trained, upload.num_examples, magnitudes)

    def running_means(self, round_state: SpectralRound) -> Sequence[RunningMean]:
        """One sum over the dense tensors, and one for each layer's terms."""
        return [round_state.mean, *(layer.mean for layer in round_state.layers.values())]

    def apply(self, server: nn.Module, round_state: SpectralRound) -> None:
        """Pseudo-gradients of the dense tensors, and of each sharded weight from the mean change of its terms."""
        apply_mean_change(server, round_state.mean.finish())
        for name, blocks in by_parameter(list(self.report(server).blocks.values())):
            weight = server.get_parameter(name)
            changes = [round_state.layers[block.name].weight_change().to(weight.dtype) for block in blocks]
            weight.grad = -assemble(blocks, changes, weight)

    def diagnostics(self, round_state: SpectralRound) -> Mapping[str, float]:
        """Share of terms visited, normalised inclusion entropy and the largest multiplier."""
        return round_state.diagnostics()


def _singular_terms(named_matrix: tuple[str, Tensor]) -> tuple[Tensor, ...]:
    name, matrix = named_matrix
    with _blamed(name):
        return singular_terms(matrix)


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Name the layer whose weight is at fault."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Layer {name!r} cannot be factorised: {error}") from error


def _decomposition_cost(named_matrix: tuple[str, Tensor]) -> float:
    """Multiplications of a singular value decomposition, up to a factor."""
    rows, columns = named_matrix[1].shape
    return float(rows * columns * min(rows, columns))
