"""What one of twelve clients can do that reverses its update, under bounds on its weight and its length; a minute.

    python benchmarks/one_liar.py

Digits of scikit-learn; 12 clients, the largest of which has 30 times the examples of the smallest, and which differ in
labels. All train for an epoch in each of 20 rounds. Prints the mean test accuracy of two seeds in per cent, of
honest clients, of a liar of median size, and of one that claims 2^39 examples; and the share of honest updates, in per
cent, that are shortened.
"""

from __future__ import annotations

import math
from statistics import fmean, median

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_spectral.filters import UsualUpdateNorm
from lightning_spectral.network.roster import with_max_share

NUM_CLIENTS, NUM_ROUNDS, LR, BATCH_SIZE, SEEDS = 12, 20, 0.3, 32, 2
MAX_SHARES, TIMES = (0.5, 0.25, 0.15), (10.0, 3.0, 2.0)
LIAR, CLAIMED = NUM_CLIENTS // 2, 2**39


def clients_of(x: Tensor, y: Tensor, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Sizes grow geometrically to 30 times the smallest; a client prefers three labels three to one."""
    sizes = 30.0 ** torch.linspace(0, 1, NUM_CLIENTS)
    parts, left = [], torch.ones(len(y))
    for client, size in enumerate((sizes / sizes.sum() * len(y) * 0.9).int().tolist()):
        likes = torch.isin(y, torch.tensor([client % 10, (client + 1) % 10, (client + 2) % 10]))
        chosen = torch.multinomial(left * torch.where(likes, 3.0, 1.0), size, generator=generator)
        left[chosen] = 0.0
        parts.append((x[chosen], y[chosen]))
    return parts


def trained(net: nn.Module, weights: Tensor, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """The weights after a local epoch."""
    nn.utils.vector_to_parameters(weights.clone(), net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for batch in torch.randperm(len(y), generator=generator).split(BATCH_SIZE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def outcome(max_share: float, times: float, lie: str, seed: int) -> tuple[float, float]:
    """The test accuracy after the last round, and the share of updates that were shortened, in per cent."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, order = x.float() / 16.0, torch.randperm(len(y), generator=generator)
    clients, test = clients_of(x[order[400:]], y[order[400:]], generator), order[:400]
    sizes = torch.tensor([len(labels) for _, labels in clients])
    sizes[LIAR] = CLAIMED if lie == "claims" else sizes[LIAR]
    counted = with_max_share(sizes, max_share).double()
    net, bound, usual = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), UsualUpdateNorm(times), math.nan
    weights, num_shortened = nn.utils.parameters_to_vector(net.parameters()).detach(), 0
    for _ in range(NUM_ROUNDS):
        updates = [trained(net, weights, *client, generator) - weights for client in clients]
        if lie != "none":
            updates[LIAR] *= -1e6
        limit, norms = (
            bound.limit(lambda w=weights: float(max(w.norm(), len(w) ** 0.5)), usual),
            [float(u.norm()) for u in updates],
        )
        shortened = torch.stack([u * min(1.0, limit / norm) for u, norm in zip(updates, norms, strict=True)])
        weights = weights + ((counted / counted.sum()).float() @ shortened)
        usual, num_shortened = median(norms), num_shortened + sum(norm > limit for norm in norms)
    nn.utils.vector_to_parameters(weights, net.parameters())
    found = float((net(x[test]).argmax(1) == y[test]).float().mean())
    return 100.0 * found, 100.0 * num_shortened / (NUM_CLIENTS * NUM_ROUNDS)


def main() -> None:
    print("| `max_share` | `times` | honest | shortened | a liar | that claims 2^39 examples |\n|" + 6 * " --- |")
    for max_share in MAX_SHARES:
        for times in TIMES:
            found = {
                lie: [
                    fmean(each) for each in zip(*(outcome(max_share, times, lie, s) for s in range(SEEDS)), strict=True)
                ]
                for lie in ("none", "lies", "claims")
            }
            cells = *found["none"], found["lies"][0], found["claims"][0]
            print(f"| {max_share:g} | {times:g} | " + " | ".join(f"{value:.1f}" for value in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
