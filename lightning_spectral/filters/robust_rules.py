"""Rules that combine updates so that a minority of clients cannot move the result far, whatever it sends."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole, check_fields
from lightning_spectral.functional.figures import middle

STEPS = 100  # of Weiszfeld's algorithm, at most
NEAR = 1e-9  # relative change of the distances at which it ends


class Changes:
    """What the clients of a round have changed, entry by entry, where some may hold parts of tensors.

    Args:
        changes: For each client, the change of each tensor, float64, by name.
        places: Likewise, the places of its entries in the flattened whole of each tensor of which it holds a part.

    Example:
        >>> one, other = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0])}
        >>> changes = Changes([one, other], [{}, {"w": torch.tensor([1])}])
        >>> changes.stacked("w")
        (tensor([[1., 2.],
                [0., 5.]], dtype=torch.float64), tensor([[ True,  True],
                [False,  True]]))
    """

    def __init__(self, changes: Sequence[Mapping[str, Tensor]], places: Sequence[Mapping[str, Tensor]]) -> None:
        self._changes, self._places = changes, places
        self.names = sorted({name for own in changes for name in own})

    def __len__(self) -> int:
        return len(self._changes)

    def stacked(self, name: str) -> tuple[Tensor, Tensor]:
        """The changes of one tensor, shape ``(clients, entries)``, 0 where a client holds none, and who holds which."""
        where = [self._where(client, name) for client in range(len(self))]
        size = 1 + max(int(own.max()) if own.numel() else -1 for own in where)
        values = torch.zeros(len(self), size, dtype=torch.float64)
        held = torch.zeros(len(self), size, dtype=torch.bool)
        for client, own in enumerate(where):
            if own.numel():
                values[client, own] = self._changes[client][name].reshape(-1).double()
                held[client, own] = True
        return values, held

    def at(self, client: int, name: str, center: Tensor) -> Tensor:
        """The entries of one tensor's center that a client holds, in the shape in which it holds them."""
        return center[self._where(client, name)].view_as(self._changes[client][name])

    def _where(self, client: int, name: str) -> Tensor:
        if (own := self._changes[client].get(name)) is None:
            return torch.zeros(0, dtype=torch.int64)
        places = self._places[client].get(name)
        return torch.arange(own.numel()) if places is None else places.reshape(-1).cpu()


class RobustRule(ABC):
    """Combines what clients have changed; a frozen choice."""

    @property
    @abstractmethod
    def least(self) -> int:
        """The number of clients below which it cannot be applied."""

    @abstractmethod
    def passed_on(self, changes: Changes) -> Sequence[Mapping[str, Tensor] | None]:
        """What stands for each client's change: all, or some tensors; ``None`` for a client that is left out."""


class _Center(RobustRule):
    """A rule that replaces every client's change by one center, so that their mean is that center."""

    least = 1

    @abstractmethod
    def centers(self, changes: Changes) -> Mapping[str, Tensor]:
        """The center of each tensor's changes, flattened, by name."""

    def passed_on(self, changes: Changes) -> Sequence[Mapping[str, Tensor] | None]:
        centers, clients = self.centers(changes), range(len(changes))
        held = [[name for name in changes.names if name in changes._changes[client]] for client in clients]
        return [{name: changes.at(client, name, centers[name]) for name in held[client]} for client in clients]


@dataclass(frozen=True)
class Median(_Center):
    """The median of the clients that hold an entry, each entry on its own; of an even number, the middle two's mean.

    Reference:
        Yin et al. (2018), Byzantine-robust distributed learning, Definition 1.

    Example:
        >>> changes = Changes([{"w": torch.tensor([value])} for value in (1.0, 2.0, 900.0)], [{}] * 3)
        >>> Median().centers(changes)
        {'w': tensor([2.], dtype=torch.float64)}
    """

    def centers(self, changes: Changes) -> Mapping[str, Tensor]:
        return {name: middle(*changes.stacked(name), share=0.5) for name in changes.names}


@dataclass(frozen=True)
class TrimmedMean(_Center):
    """The mean of the clients that hold an entry without the smallest and the largest, each entry on its own.

    Args:
        share: Share of the clients that is left out at either end, rounded down, in [0, 0.5).

    Reference:
        Yin et al. (2018), Byzantine-robust distributed learning, Definition 2.

    Example:
        >>> changes = Changes([{"w": torch.tensor([value])} for value in (1.0, 2.0, 3.0, 900.0)], [{}] * 4)
        >>> TrimmedMean(0.25).centers(changes)
        {'w': tensor([2.5000], dtype=torch.float64)}
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self, share=Number(at_least=0, below=0.5))

    def centers(self, changes: Changes) -> Mapping[str, Tensor]:
        return {name: middle(*changes.stacked(name), share=self.share) for name in changes.names}


@dataclass(frozen=True)
class GeometricMedian(_Center):
    r"""The point whose distances from all updates have the smallest sum, by Weiszfeld's algorithm.

    It begins at the median of each entry, so that a few far away do not decide where. All clients count alike.

    Reference:
        Pillutla et al. (2022), Robust aggregation for federated learning, Algorithm 2, with equal weights.

    Example:
        >>> points = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (900.0, 900.0)]
        >>> changes = Changes([{"w": torch.tensor(point)} for point in points], [{}] * 4)
        >>> GeometricMedian().centers(changes)["w"].round(decimals=3).tolist()
        [0.5, 0.5]
    """

    def centers(self, changes: Changes) -> Mapping[str, Tensor]:
        stacked = {name: changes.stacked(name) for name in changes.names}
        found = {name: middle(values, held, share=0.5) for name, (values, held) in stacked.items()}
        distances = torch.full((len(changes),), torch.inf, dtype=torch.float64)
        for _ in range(STEPS):
            before, distances = distances, _distances_to(stacked, found)
            scale = float(distances.max())
            if scale == 0.0 or bool(((before - distances).abs() <= NEAR * scale).all()):
                break
            weights = 1.0 / distances.clamp(min=NEAR * scale)
            for name, (values, held) in stacked.items():
                own = held * weights.unsqueeze(1)
                found[name] = (values * own).sum(0) / own.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
        return found


@dataclass(frozen=True)
class MultiKrum(RobustRule):
    """The updates that are closest to their neighbours, which are averaged as the algorithm averages.

    Each update has the sum of the squared distances from its n - f - 2 nearest others as its score; those with the
    smallest scores are chosen, of equal ones the first clients. Where clients hold parts, the distance of two is that
    over what both hold, scaled to all.

    Args:
        num_liars: Number f of clients that may send anything, at least 0.
        num_chosen: Number of updates that are averaged; ``None`` for n - f.

    Reference:
        Blanchard et al. (2017), Machine learning with adversaries, section 4 and, for several updates, section 5.

    Example:
        >>> changes = Changes([{"w": torch.tensor([value])} for value in (1.0, 1.1, 1.2, 900.0)], [{}] * 4)
        >>> [own is not None for own in MultiKrum(num_liars=1).passed_on(changes)]
        [True, True, True, False]
    """

    num_liars: int
    num_chosen: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, num_liars=Whole(at_least=0), num_chosen=Whole(at_least=1, optional=True))

    @property
    def least(self) -> int:
        return max(self.num_liars + 3, self.num_chosen or 1)

    def passed_on(self, changes: Changes) -> Sequence[Mapping[str, Tensor] | None]:
        number = len(changes)
        squares = _squared_distances(changes).fill_diagonal_(torch.inf)
        scores = squares.sort(dim=1).values[:, : number - self.num_liars - 2].sum(1)
        chosen = scores.sort(stable=True).indices[: self.num_chosen or number - self.num_liars].tolist()
        return [{} if client in chosen else None for client in range(number)]


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one update that is closest to its neighbours, as in `MultiKrum`.

    Reference:
        Blanchard et al. (2017), Machine learning with adversaries, section 4.

    Example:
        >>> changes = Changes([{"w": torch.tensor([value])} for value in (1.0, 1.1, 1.3, 900.0)], [{}] * 4)
        >>> [own is not None for own in Krum(num_liars=1).passed_on(changes)]
        [True, False, False, False]
    """

    num_chosen: int | None = field(default=1, init=False, repr=False)


def _distances_to(stacked: Mapping[str, tuple[Tensor, Tensor]], centers: Mapping[str, Tensor]) -> Tensor:
    """The distance of each client's update from some centers, scaled to all entries."""
    pairs = [(values, held, centers[name]) for name, (values, held) in stacked.items()]
    squares = torch.stack([((values - center).square() * held).sum(1) for values, held, center in pairs]).sum(0)
    own = torch.stack([held.sum(1) for _, held, _ in pairs]).sum(0)
    entries = sum(center.numel() for _, _, center in pairs)
    return (squares * entries / own.clamp(min=1)).sqrt()


def _squared_distances(changes: Changes) -> Tensor:
    """The squared distance of each pair of updates over what both hold, scaled to all; infinite if that is nothing."""
    number, entries = len(changes), 0
    squares, shared = torch.zeros(2, number, number, dtype=torch.float64)
    for name in changes.names:
        values, held = changes.stacked(name)
        entries += held.shape[1]
        for client in range(number):  # row by row, since all pairs at once would take the memory of as many updates
            both = held & held[client]
            squares[client] += ((values - values[client]).square() * both).sum(1)
            shared[client] += both.sum(1)
    return torch.where(shared > 0, squares * entries / shared.clamp(min=1.0), torch.inf)
