"""Rounds of spectral sharding without Lightning, on a small net whose clients add noise."""

import torch
from torch import nn

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.algorithm import SpectralRound
from lightning_spectral.client.forms import Forms
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, Receipt, WorkUnit


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 10), nn.Linear(10, 3)
        )


def unit(client_id: int) -> WorkUnit:
    return WorkUnit(client_id, coefficient=client_id + 1)


def cohort(ratios: list[float], seed: int = 0, round_idx: int = 0) -> Cohort:
    groups = {ratio: tuple(unit(c) for c, own in enumerate(ratios) if own == ratio) for ratio in ratios}
    return Cohort(seed, round_idx, groups)


def draw(
    algorithm: ls.SpectralSharding, server: nn.Module, ratios: list[float]
) -> tuple[SpectralRound, list[tuple[Download, Receipt]]]:
    opened = algorithm.bind(server).open(cohort(ratios))
    return opened, [opened.send(unit(c)) for c in range(len(ratios))]


def train(client: nn.Module, seed: int, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in client.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def run_round(
    algorithm: ls.SpectralSharding, server: nn.Module, ratios: list[float], trained: bool = True
) -> list[tuple[Receipt, dict[str, torch.Tensor]]]:
    opened, sent = draw(algorithm, server, ratios)
    side = algorithm.bind(server).client_side
    forms = Forms(server, side.take_form)
    seen = []
    for c, (download, receipt) in enumerate(sent):
        with forms.client(download.capacity) as client:
            side.load(client, download)
            if trained:
                train(client, seed=c)
            upload = side.collect(client, download)
        opened.add(receipt, upload)
        seen.append((receipt, {name: t.clone() for name, t in upload.tensors.items()}))
    opened.close()
    torch.optim.SGD(server.parameters(), lr=1.0).step()
    return seen
