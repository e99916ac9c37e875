"""Aggregation with stale updates: clients that do not take part in a round contribute their last update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Observed, Promises
from lightning_spectral.algorithms.fed_avg import DenseRound, FedAvg, FedAvgHalf, dense_mean, sum_of
from lightning_spectral.algorithms.memory.kept import ClientSum, by_share, compress, entries_of, restore, update_of
from lightning_spectral.arguments import Number, OneOf, Whole, check_fields
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import Receipt, Tensors, Upload, WorkUnit
from lightning_spectral.sums import RunningMean, check_summable
from lightning_spectral.sums.exact_mean import largest_magnitudes, largest_within

Coefficients = Literal["sampled", "data"]
Unseen = Literal["zero", "mean"]
SEEN = "share:seen"  # next to the parameters in the server's sum: 1 for each client in the table, weighted by its share


class StaleRound(DenseRound):
    """One open round with stale updates.

    Attributes:
        total: The sum H of all clients' stale updates, as it was when the round opened.
        entries: What the table held of the round's clients when it opened, on the CPU.
        drawn: Running mean of their stale updates, with the weights of their new ones.
        table: Running sum of the changes of H.
    """

    def __init__(self, half: FedAvgHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        assert isinstance(half.state, ClientSum), "made by `new_state`"
        assert isinstance(half.algorithm, StaleUpdates)
        self.choice, self.total = half.algorithm, half.state
        weighted = by_share(cohort) if self.choice.coefficients == "data" else cohort
        self.mean = dense_mean(half.server, self.mean.before, weighted)
        pieces = self.total.pieces()
        self.trained: Tensors = {name: tensor for name, tensor in self.mean.before.items() if name in pieces}
        self.entries = entries_of(cohort)
        self.drawn = sum_of(self.trained, weighted)
        self.table = self.total.change([*self.trained, SEEN], cohort)

    @cached_property
    def over_all(self) -> Tensors:
        """The sum of shares times stale updates over all clients; unseen clients contribute what `unseen` says."""
        pieces = self.total.pieces()
        seen = float(pieces[SEEN])
        divisor = seen if self.choice.unseen == "mean" and seen > 0.0 else 1.0
        return {name: pieces[name] / divisor for name in self.drawn.names}

    @cached_property
    def largest(self) -> Mapping[str, float]:
        return largest_magnitudes(self.trained)

    def entry(self, unit: WorkUnit) -> Tensors:
        """What the table held of a client when the round opened, float64; zeros if nothing."""
        return restore(self.entries[unit.key], self.trained) if unit.key in self.entries else self.drawn.before

    def stale_update(self, unit: WorkUnit) -> Tensors:
        """What a client contributes unless it takes part, float64."""
        if unit.key in self.entries or self.choice.unseen == "zero":
            return self.entry(unit)
        return self.over_all

    def add(self, receipt: Receipt, upload: Upload) -> None:
        unit = receipt.unit
        share = self.cohort.shares[unit.key]
        weight = share if self.choice.coefficients == "data" else unit.coefficient
        entry = compress(update_of(self.trained, upload.tensors), self.choice.num_terms)
        new, old, largest = restore(entry, self.trained), self.entry(unit), upload.largest
        # the table changes by the difference of two updates, and no entry of leading terms exceeds the update's norm
        norms = [math.sqrt(t.numel()) * (largest[name] + self.largest[name]) for name, t in self.trained.items()]
        bound = 2 * max(norms, default=0.0)
        check_summable(largest_within(bound, lambda: 2 * nn.utils.parameters_to_vector(new.values())))
        is_new = torch.tensor(float(unit.key not in self.entries), dtype=torch.float64, device=self.total.values.device)
        self.mean.add(upload.tensors, weight, largest)
        self.drawn.add(self.stale_update(unit), weight)
        self.table.add({**{name: new[name] - old[name] for name in new}, SEEN: is_new}, share)
        self.cohort.store[unit] = entry

    def expected_update(self, unit: WorkUnit) -> Tensors:
        """The client's stale update times beta, as it was when the round opened, even if it has trained since."""
        return {name: self.choice.beta * stale for name, stale in self.stale_update(unit).items()}

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, self.drawn, self.table]

    def close(self) -> None:
        drawn = dict(self.drawn.finish()) if self.choice.beta else {}

        def corrected() -> Iterator[tuple[str, Tensor]]:
            for name, change in self.mean.finish():
                if name in drawn:
                    change.add_(self.over_all[name] - drawn[name], alpha=self.choice.beta)
                yield name, change

        apply_mean_change(self.half.server, corrected())
        self.total.add(self.table)

    def observed(self) -> Observed:
        """The share of all examples whose clients are in the table, and the norm of the sum over all clients."""
        pieces = self.total.pieces()
        share = float(pieces.pop(SEEN))
        norm = float(nn.utils.parameters_to_vector(pieces.values()).norm())
        return Observed({"stale_share": share, "stale_norm": norm})


@dataclass(frozen=True)
class StaleUpdates(FedAvg):
    r"""Federated averaging in which the server also uses the last update of every client.

    The server keeps a table of each client's last update :math:`h_i`, the change of its trainable parameters. Given the
    updates :math:`\Delta_i` of a round's clients A, it takes the step

    .. math:: w \leftarrow w + \beta \sum_i d_i h_i + \sum_{i \in A} c_i (\Delta_i - \beta h_i),

    and only then sets :math:`h_i \leftarrow \Delta_i` for those clients. Here d is a client's share of all examples,
    the same in every round, and c is its coefficient. With the coefficients d/p of an unbiased sampler, the step is
    unbiased whatever the table holds, and its variance falls as the table gets closer to the updates. Under uniform
    participation p is not known here, so the second sum is divided by the sum of the coefficients of the clients that
    reported, as in the published FedVARP. This is unbiased for clients of equal size.

    ``StaleUpdates()`` is FedVARP and the rule of GVR*, ``StaleUpdates(beta=0.5)`` is FedStale, ``beta=0`` moves the
    server as `FedAvg` does, and `mifa` is MIFA. A client that is left out of a round does not change the table. Buffers
    follow their rules and tensors are sent as in `FedAvg`.

    Args:
        beta: Weight of the stale updates, in [0, 1].
        coefficients: ``"sampled"`` for the cohort's c; ``"data"`` for d instead, however likely the client was to take
            part. With beta 1 the step is then the mean of all clients' latest updates, which is biased, because those
            of clients that rarely take part are old.
        unseen: What a client that has never taken part contributes: ``"zero"``, or the ``"mean"`` of those that have,
            weighted by their shares. Both are known before the round's clients are drawn, so neither adds a bias.
        num_terms: Number of leading singular terms that the table keeps of each tensor of two dimensions or more, which
            takes a fraction of the memory; ``None`` for all. Both sums use the same truncated update.

    Note:
        For N clients, the server stores N times the trainable parameters, logged as ``fl/store_bytes``, plus three
        float64 numbers per parameter. In a round without clients the server steps by the stale updates alone; otherwise
        the average over rounds would be biased.

        The slides of GVR* print the same condition, i in A, for both cases of h; the second should be i not in A. The
        official code of MIFA waits until each client has been seen once, and fills the table with a full round. This
        server trains from the first round; with ``unseen="mean"``, its steps are as long as later ones from the second
        round on.

    Reference:
        Jhunjhunwala et al. (2022), FedVARP; Rodio & Neglia (2024), FedStale; Gu et al. (2021), MIFA.

    Example:
        >>> StaleUpdates.mifa()
        StaleUpdates(beta=1.0, coefficients='data', unseen='zero', num_terms=None)
    """

    round: ClassVar[type[DenseRound]] = StaleRound
    promises: ClassVar[Promises] = Promises(
        new_values=True,
        values_alone=True,
        same_tensors=True,
        parts_stay=True,
        any_steps=True,
        expected_updates=True,
        steps_without_clients=True,
    )

    beta: float = 1.0
    coefficients: Coefficients = "sampled"
    unseen: Unseen = "zero"
    num_terms: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            beta=Number(at_least=0, at_most=1, hint="it is the weight of stale updates"),
            coefficients=OneOf(get_args(Coefficients)),
            unseen=OneOf(get_args(Unseen)),
            num_terms=Whole(at_least=1, optional=True),
        )

    @classmethod
    def mifa(cls) -> StaleUpdates:
        """MIFA: the mean of all clients' latest updates, with a table that starts at zero."""
        return cls(coefficients="data")

    def new_state(self, server: nn.Module, seed: int) -> ClientSum:
        return ClientSum({**{name: p.shape for name, p in server.named_parameters()}, SEEN: ()})
