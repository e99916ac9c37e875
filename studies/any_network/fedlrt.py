"""FeDLRT (Schotthöfer and Laiu, 2024, arXiv 2406.17887): clients train a small core between bases that all share.

Each round has two exchanges: gradients of the bases, by which the server augments them, then cores trained between the
augmented bases. A round of the package has one exchange, so this system is written out here, for a row of the study.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tasks import BATCH_SIZE, CLIENTS_PER_ROUND, LOCAL_EPOCHS, MOMENTUM, Classifier
from torch import Tensor, nn
from torch.func import functional_call

import lightning_spectral as ls

Tensors = dict[str, Tensor]


@dataclass
class LowRank:
    """The weight matrices of a network as U S V', by the names of the plan's blocks, and the rest of it as it is.

    Attributes:
        module: The network, of which only the structure is used.
        u: Left bases, shape ``(m, r)``.
        s: Cores, shape ``(r, r)``.
        v: Right bases, shape ``(n, r)``.
        dense: The other parameters.
        buffers: The buffers.
    """

    module: nn.Module
    u: Tensors
    s: Tensors
    v: Tensors
    dense: Tensors
    buffers: Tensors

    def __post_init__(self) -> None:
        self._blocks: dict[str, list[str]] = {}
        positions: dict[str, list[Tensor]] = {}
        for name, block in ls.nn.plan_layers(self.module).blocks.items():
            weight = self.module.get_parameter(block.parameter)
            entries = torch.arange(weight.numel()).view(weight.shape)
            self._blocks.setdefault(block.parameter, []).append(name)
            positions.setdefault(block.parameter, []).append(block.matrix(entries).flatten())
        self._order = {name: torch.cat(parts).argsort() for name, parts in positions.items()}

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits."""
        weights = dict(self.dense)
        for name, blocks in self._blocks.items():
            entries = torch.cat([(self.u[block] @ self.s[block] @ self.v[block].T).flatten() for block in blocks])
            weights[name] = entries[self._order[name]].view(self.module.get_parameter(name).shape)
        logits: Tensor = functional_call(self.module, (weights, self.buffers), (images,))
        return logits

    def copy(self, **changed: Tensors) -> LowRank:
        """Return a copy whose parameters and buffers are leaves of its own, apart from the tensors given here."""
        own = {name: {key: value.detach().clone() for key, value in getattr(self, name).items()} for name in TENSORS}
        return LowRank(self.module, **{**own, **changed})


TENSORS = ("u", "s", "v", "dense", "buffers")


def truncated(module: nn.Module, keep_ratio: float) -> LowRank:
    """Return a network whose random weights have as many terms as clients hold, with the energy of all."""
    ls.algorithms.spectral_start(module, keep_ratio, tail=0.0)
    u, s, v = {}, {}, {}
    blocks = ls.nn.plan_layers(module).blocks
    for name, block in blocks.items():
        left, values, right = torch.linalg.svd(block.matrix(module.get_parameter(block.parameter).detach()), False)
        rank = block.num_terms(keep_ratio)
        u[name], s[name], v[name] = left[:, :rank], values[:rank].diag(), right[:rank].T
    sharded = {block.parameter for block in blocks.values()}
    dense = {name: p.detach() for name, p in module.named_parameters() if name not in sharded}
    return LowRank(module, u, s, v, dense, dict(module.named_buffers())).copy()


def gradients(model: LowRank, images: Tensor, labels: Tensor) -> dict[str, Tensors]:
    """Return the gradients of bases and cores on all examples of a client, as its answer to the first exchange."""
    at = model.copy()
    leaves = [tensor.requires_grad_() for kind in ("u", "s", "v") for tensor in getattr(at, kind).values()]
    found = iter(torch.autograd.grad(nn.functional.cross_entropy(at(images), labels), leaves))
    return {kind: {name: next(found) for name in getattr(at, kind)} for kind in ("u", "s", "v")}


def augmented(model: LowRank, mean_gradients: Mapping[str, Tensors]) -> LowRank:
    """Return the same network between bases that also span the gradients; their new directions have zero cores."""
    bases = {
        kind: {name: _more_columns(basis, mean_gradients[kind][name]) for name, basis in getattr(model, kind).items()}
        for kind in ("u", "v")
    }
    cores = {}
    for name, core in model.s.items():
        cores[name] = core.new_zeros(bases["u"][name].shape[1], bases["v"][name].shape[1])
        cores[name][: len(core), : len(core)] = core
    return model.copy(s=cores, **bases)


def _more_columns(basis: Tensor, gradient: Tensor) -> Tensor:
    """Return an orthonormal basis that begins with one and also spans a gradient, as far as there is room."""
    outside = gradient - basis @ (basis.T @ gradient)
    added = torch.linalg.qr(outside)[0]
    added = torch.linalg.qr(added - basis @ (basis.T @ added))[0]  # twice, to be orthogonal to rounding
    return torch.cat([basis, added], 1)[:, : len(basis)]


def train_client(
    model: LowRank, correction: Tensors, batches: Iterator[tuple[Tensor, Tensor]], optimizer_of: Any
) -> tuple[LowRank, float]:
    """Train cores and dense parameters between fixed bases; return them, and the mean loss.

    Args:
        model: The network between augmented bases.
        correction: What is added to the gradients of the old part of each core: the cohort's minus the client's own,
            at the start of the round.
        batches: Images and labels of each local step.
        optimizer_of: Makes the optimizer.
    """
    client = model.copy()
    trained = [tensor.requires_grad_() for kind in ("s", "dense") for tensor in getattr(client, kind).values()]
    optimizer, losses = optimizer_of(trained), []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(client(images), labels)
        loss.backward()
        for name, added in correction.items():
            client.s[name].grad[: len(added), : len(added)] += added  # type: ignore[index]
        optimizer.step()
        losses.append(loss.detach())
    return client.copy(), float(torch.stack(losses).mean())


def weighted_mean(tensors: list[Tensors], weights: list[float]) -> Tensors:
    """Return the mean of named tensors with weights that sum to 1."""
    mean = {
        name: sum(weight * each[name].double() for each, weight in zip(tensors, weights, strict=True))
        for name in tensors[0]
    }
    return {name: torch.as_tensor(mean[name]).to(first.dtype) for name, first in tensors[0].items()}


def closed(clients: list[LowRank], weights: list[float], ranks: Mapping[str, int]) -> LowRank:
    """Return the mean of the clients, its cores cut to their largest singular values."""
    kinds = ("s", "dense", "buffers")
    model = clients[0].copy(**{kind: weighted_mean([getattr(c, kind) for c in clients], weights) for kind in kinds})
    for name, rank in ranks.items():
        left, values, right = torch.linalg.svd(model.s[name])
        model.u[name] = model.u[name] @ left[:, :rank]
        model.v[name] = model.v[name] @ right[:rank].T
        model.s[name] = values[:rank].diag()
    return model


def bytes_of_a_turn(model: LowRank) -> int:
    """Return what a client receives and sends in both exchanges of a round, in single precision."""
    whole = 2 * sum(tensor.numel() for kind in (model.dense, model.buffers) for tensor in kind.values())
    for name, core in model.s.items():
        bases, rank = model.u[name].numel() + model.v[name].numel(), len(core)
        whole += 3 * bases + 3 * rank**2 + (2 * rank) ** 2  # bases, their gradients, new directions; cores
    return 4 * whole


def rounds(
    model: LowRank, clients: list[tuple[Tensor, Tensor]], classifier: Classifier, seed: int
) -> Iterator[tuple[LowRank, float]]:
    """Yield the server's network and the mean local loss after each round."""
    generator = torch.Generator().manual_seed(seed)
    ranks = {name: len(core) for name, core in model.s.items()}
    for round_idx in range(classifier.num_rounds):
        lr = classifier.lr * classifier.cosine(round_idx)

        def optimizer_of(trained: list[Tensor], lr: float = lr) -> torch.optim.Optimizer:
            if classifier.adaptive:
                return torch.optim.AdamW(trained, lr=lr)
            return torch.optim.SGD(trained, lr=lr, momentum=MOMENTUM)

        cohort = [clients[i] for i in torch.randperm(len(clients), generator=generator)[:CLIENTS_PER_ROUND]]
        total = sum(len(labels) for _, labels in cohort)
        weights = [len(labels) / total for _, labels in cohort]
        own = [gradients(model, *data) for data in cohort]
        mean = {kind: weighted_mean([each[kind] for each in own], weights) for kind in ("u", "s", "v")}
        wide, trained, losses = augmented(model, mean), [], []
        for (images, labels), each in zip(cohort, own, strict=True):
            correction = {name: mean["s"][name] - each["s"][name] for name in ranks}
            order = torch.cat([torch.randperm(len(labels), generator=generator) for _ in range(LOCAL_EPOCHS)])
            parts = [part for epoch in order.chunk(LOCAL_EPOCHS) for part in epoch.split(BATCH_SIZE)]
            client, loss = train_client(wide, correction, ((images[i], labels[i]) for i in parts), optimizer_of)
            trained.append(client)
            losses.append(loss)
        model = closed(trained, weights, ranks)
        yield model, sum(weight * loss for weight, loss in zip(weights, losses, strict=True))


def train(
    classifier: Classifier, data: Any, keep_ratio: float, seed: int, every: int
) -> tuple[dict[str, list[float]], int, str]:
    """Train a run; return its curves, the bytes of a client's turn, and the error that ended it, if one did.

    Args:
        classifier: The network, its learning rate and schedule.
        data: The images as they are dealt to clients, and others in ``val``.
        keep_ratio: Share of the terms that the network has.
        seed: Seed of cohorts and shuffles.
        every: Number of rounds between two evaluations.
    """
    (images, labels), (others, targets, is_test) = data.train.tensors, data.val.tensors
    clients = [(images[ids], labels[ids]) for ids in data.partition]
    model, curves = truncated(classifier.net, keep_ratio), {"val": [], "test": [], "fl/loss": []}
    turn = bytes_of_a_turn(model)
    for round_idx, (after, loss) in enumerate(rounds(model, clients, classifier, seed), start=1):
        curves["fl/loss"].append(loss)
        if not math.isfinite(loss):
            return curves, turn, f"The loss is {loss} in round {round_idx}."
        if round_idx % every == 0:
            model.module.eval()
            with torch.no_grad():
                right = (after(others).argmax(1) == targets).float()
            model.module.train()
            for name, part in {"val": ~is_test, "test": is_test}.items():
                curves[name].append(float(right[part].mean()))
    return curves, turn, ""
