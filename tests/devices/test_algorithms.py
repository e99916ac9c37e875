"""Every algorithm, with its options, ends on another device with the weights and metrics that it has on the CPU."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fake_line import remote, toy_line
from federation import Fit, seeded
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP, LitSmall, Remembering

import lightning_spectral as ls
from lightning_spectral import models
from lightning_spectral.algorithms.fed_avg import DenseRound
from lightning_spectral.network import workplace
from lightning_spectral.plugin.trainer import silent_trainer
from lightning_spectral.testing import check_algorithm, doctor

HALF, RANKS, NORM = {0.4: 0.5, 0.8: 0.5}, {1: 0.5, 3: 0.5}, ["net.1.*"]
ALGORITHMS: dict[str, ls.Algorithm] = {
    "FedAvg": ls.FedAvg(),
    "store": Remembering(),
    "Scaffold": ls.Scaffold(),
    "FedBuff": ls.FedBuff(concurrency=3, max_staleness=2),
    "StaleUpdates": ls.StaleUpdates(),
    "StaleUpdates, terms": ls.StaleUpdates(num_terms=1, unseen="mean", beta=0.5),
    "MIFA": ls.StaleUpdates.mifa(),
    "Collective": ls.SpectralSharding(keep_ratio=HALF),
    "Unbiased": ls.SpectralSharding(ls.Unbiased(), keep_ratio=HALF, clip_tau=1.2, frobenius_decay=0.01),
    "PriSM": ls.SpectralSharding(ls.PriSM(), keep_ratio=0.5, design=ls.SuccessiveSampling()),
    "TopN": ls.SpectralSharding(ls.TopN(), keep_ratio=0.5, aggregation=ls.algorithms.MatrixMeans()),
    "Scaled": ls.SpectralSharding(ls.sharding.Scaled(ls.Unbiased()), keep_ratio=HALF, design=ls.designs.Coordinated()),
    "Schatten": ls.SpectralSharding(ls.sharding.Schatten(), keep_ratio=HALF, design=ls.Brewer()),
    "EffectiveCohort": ls.SpectralSharding(ls.EffectiveCohort(), keep_ratio=0.5, design=ls.Systematic()),
    "MinimumSupport": ls.SpectralSharding(keep_ratio=0.5, design=ls.MinimumSupport()),
    "Zampling": ls.Zampling(compression=2, degree=3),
    "Zampling, more options": ls.Zampling(compression=2, degree=3, downlink_bits=4, coordinated=True, memory=0),
    "Zampling, not sampled": ls.Zampling(compression=2, degree=3, sampled=False),
    "supermask": ls.Zampling.supermask(),
    "FedPM": ls.Zampling.fed_pm(),
    "PrefixChannels": ls.WidthSharding(keep_ratio=HALF),
    "RollingChannels": ls.WidthSharding(ls.RollingChannels(), keep_ratio=HALF),
    "RandomChannels": ls.WidthSharding(ls.RandomChannels(), keep_ratio=HALF),
    "step widths": ls.WidthSharding(keep_ratio=HALF, step_widths=(0.4, 0.8), averages_per_width=True),
    "FIARSE": ls.FIARSE(keep_ratio=HALF),
    "LoRA": ls.LoRA(RANKS, train=NORM),
    "LoRA, PaddedFactors": ls.LoRA(2, train=NORM, aggregation=ls.PaddedFactors(), merge_every=1),
    "LoRA, StackedProducts": ls.LoRA(RANKS, train=NORM, aggregation=ls.StackedProducts()),
    "LoRA, TruncatedProducts": ls.LoRA(RANKS, train=NORM, aggregation=ls.TruncatedProducts()),
    "LoRA, SampledTerms": ls.LoRA(RANKS, train=NORM, aggregation=ls.SampledTerms()),
    "LoRA, FrozenA": ls.LoRA(2, train=NORM, aggregation=ls.FrozenA()),
    "LoRA, AlternatingFactors": ls.LoRA(2, train=NORM, aggregation=ls.AlternatingFactors()),
}
FILTERS: dict[str, list[ls.Filter]] = {"TopK": [ls.TopK(0.1)], "Int8": [ls.Personal(["net.1.*"]), ls.Int8()]}
SYSTEMS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": algorithm} for name, algorithm in ALGORITHMS.items()},
    **{name: {"filters": filters} for name, filters in FILTERS.items()},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SYSTEMS)
def test_an_algorithm_is_the_same(name: str, data: Any, fit: Fit, there: Fit, agree: Any) -> None:
    lit = partial(seeded, LitSmall, momentum=0.0 if name == "Scaffold" else 0.9)
    agree(*(run(lit(), data, max_epochs=2, **SYSTEMS[name]) for run in (fit, there)))


@pytest.mark.slow
@pytest.mark.parametrize("name", doctor.ALGORITHMS)
def test_the_doctor_finds_nothing_wrong(name: str, device: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {name: doctor.ALGORITHMS[name]}
    assert doctor.main(["--device", str(device.torch)], chosen) == 0, capsys.readouterr().out


class DriftingRound(DenseRound):
    def close(self) -> None:
        super().close()
        for parameter in self.half.server.parameters():
            if parameter.device.type != "cpu":
                parameter.grad += 1e-3 * parameter.detach()


class DriftsElsewhere(ls.FedAvg):
    round = DriftingRound


def test_an_algorithm_that_is_wrong_on_the_device_alone_is_found(device: Any) -> None:
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    with pytest.raises(AssertionError, match=rf"round 0 on {device.torch}: .* differs from the CPU's by \de-"):
        check_algorithm(DriftsElsewhere(), seeded(LitSmall), batch, device=device.torch)


NETS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: models.FEMNISTCNN(num_classes=4, image_size=8, channels=(4, 8), hidden_features=16),
    "resnet": lambda: models.ResNet18(num_classes=4, width=4, image_size=8),
    "cct": lambda: models.CCT(num_classes=4, image_size=8, width=16, num_heads=2, num_layers=1),
    "gpt": lambda: models.CharTransformer(vocab_size=4, context_length=6, width=16, num_heads=2, num_layers=1),
}


OF_NETS = {
    "spectral": ls.SpectralSharding(keep_ratio=0.5),
    "bits": ls.Zampling(compression=2, degree=3),
    "width": ls.WidthSharding(),
    "adapters": ls.LoRA(1),
}
PAIRS = list(itertools.product(NETS, OF_NETS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_a_model_is_the_same(name: str, algorithm: str, fit: Fit, there: Fit, agree: Any) -> None:
    options = {"algorithm": OF_NETS[algorithm], "clients_per_round": 2}
    agree(*(run(task(name), examples(name), **options) for run in (fit, there)))


def task(name: str) -> models.LitClassifier:
    task_type = models.LitNextToken if name == "gpt" else models.LitClassifier
    net = seeded(NETS[name])
    for part in net.modules():  # each device drops others
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return task_type(net, num_classes=4, lr=0.05)


def examples(name: str) -> ls.FederatedDataModule:
    """Three clients of four examples each."""
    shape = (12, *task(name).example_input_array.shape[1:])
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        x = torch.randint(4, shape, generator=generator)
        train = TensorDataset(x, x)
    else:
        train = TensorDataset(torch.randn(shape, generator=generator), torch.randint(4, (12,), generator=generator))
    return ls.FederatedDataModule(train, ls.IIDPartitioner(num_clients=3), val=train, batch_size=4)


OF_NETWORK: dict[str, Any] = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(keep_ratio=0.5),
    "SCAFFOLD": ls.Scaffold(),
    "LoRA": ls.LoRA(2),
    "Zampling": ls.Zampling(compression=2, degree=3),
    "stale updates": ls.StaleUpdates(beta=0.7),
}


def make() -> LitMLP:
    return LitMLP(momentum=0.0, dropout=0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OF_NETWORK)
def test_devices_train_on_their_accelerators(
    name: str, fit: Fit, device: Any, agree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"algorithm": OF_NETWORK[name], "max_epochs": 2, "seed": 3}
    theirs = fit(seeded(make), remote(toy_line(make)), **options)
    placed = []

    def there(kind: Any, **settings: Any) -> Any:
        settings = {name: value for name, value in settings.items() if name not in ("accelerator", "devices")}
        placed.append(silent_trainer(kind, **settings, **device.trainer()))
        return placed[-1]

    monkeypatch.setattr(workplace, "silent_trainer", there)
    ours = fit(seeded(make), remote(toy_line(make)), **options)
    assert placed
    assert {trainer.strategy.root_device for trainer in placed} == {device.torch}
    agree(theirs, ours)
