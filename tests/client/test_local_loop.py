"""One client's local steps: gradient scaling, and never waiting for the device."""

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import lightning_spectral as ls
import lightning_spectral.client.local_trainer
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.local_loop import Placement, train_locally
from lightning_spectral.client.recorder import Recorder


class LitPlain(pl.LightningModule):
    """Notes its largest gradient wherever a hook may look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.seen: dict[str, list[float]] = {"after backward": [], "before step": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return (self.line(x).squeeze(1) - y).square().mean()

    def note(self, when: str) -> None:
        self.seen[when].append(max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None))

    def on_after_backward(self) -> None:
        self.note("after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before step")


@pytest.fixture
def client_data() -> ClientData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator)
    source = BatchSource(TensorDataset(x, 8 * x.sum(1)))
    return ClientData(source, torch.arange(20), batch_size=4, key=(0, 0, 0))


def trained(data: ClientData, scaler: GradScaler | None, skip: Collection[int] = (), **options: Any) -> LitPlain:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LitPlain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if skip:
        step = module.training_step
        module.training_step = lambda b, i: None if i in skip else step(b, i)  # type: ignore[method-assign]
    train_locally(
        module, optimizer, data, local_epochs=1, recorder=Recorder(), placement=Placement(scaler=scaler), **options
    )
    return module


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_scaling_by_a_power_of_two_changes_no_bit(client_data: ClientData) -> None:
    plain, scaled = trained(client_data, None), trained(client_data, GradScaler("cpu", init_scale=2.0**10))
    assert same(plain, scaled)
    assert scaled.seen["after backward"] == [2.0**10 * g for g in plain.seen["after backward"]]  # as in Lightning
    assert scaled.seen["before step"] == plain.seen["before step"]


def test_a_step_whose_gradients_overflow_is_skipped(client_data: ClientData) -> None:
    """Scaled by 2^125, gradients of 8 and more do; each skipped step halves the scale."""
    scaler = GradScaler("cpu", init_scale=2.0**125)
    module = trained(client_data, scaler)
    overflows = {i for i, gradient in enumerate(module.seen["before step"]) if gradient == float("inf")}
    assert 1 <= len(overflows) <= 4
    assert same(module, trained(client_data, None, skip=overflows))


def test_every_client_starts_with_the_scale_that_was_set(client_data: ClientData) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**125)
    one = trained(client_data, scaler)
    assert scaler.get_scale() == 2.0**125
    assert same(one, trained(client_data, scaler))


def test_hooks_before_a_step_see_unscaled_gradients(client_data: ClientData) -> None:
    seen: list[float] = []

    def run(scaler: GradScaler | None) -> list[float]:
        seen.clear()
        module = LitPlain()
        nn.init.ones_(module.line.weight)
        nn.init.ones_(module.line.bias)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(lambda *args: seen.append(float(module.line.bias.grad)))  # type: ignore[arg-type]
        hook = ls.GradientClip(0.5).start_client(module, optimizer)
        train_locally(
            module,
            optimizer,
            client_data,
            local_epochs=1,
            recorder=Recorder(),
            placement=Placement(scaler=scaler),
            before_step=[lambda: seen.append(float(module.line.bias.grad)), hook],  # type: ignore[arg-type]
        )
        return list(seen)

    assert run(GradScaler("cpu", init_scale=2.0**10)) == run(None)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value of a tensor."""

    WAITING = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.WAITING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio=0.5, clip_tau=2.0)], ids=repr)
def test_local_steps_read_no_value_from_the_device(
    algorithm: Any, toy: TensorDataset, quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LitMLP(pl.LightningModule):
        reads_itself = False

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 3))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True)
            if self.reads_itself:
                loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    reads: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Reads() as mode:
            result = train_locally(*args, **kwargs)
        reads.append(mode.count)
        return result

    monkeypatch.setattr(lightning_spectral.client.local_trainer, "train_locally", counted)

    def run(local_epochs: int, module: pl.LightningModule) -> list[int]:
        reads.clear()
        model = ls.FederatedModule(
            module,
            algorithm=algorithm,
            clients_per_round=2,
            local_epochs=local_epochs,
            local_hooks=[ls.ProximalTerm(0.1), ls.GradientClip(1.0)],
        )
        data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=6), batch_size=5)
        pl.Trainer(max_epochs=1, **quiet).fit(model, data)
        return list(reads)

    dense = algorithm == ls.FedAvg()
    with nullcontext() if dense else pytest.warns(ls.SpectralWarning, match="weight_decay"):
        assert run(1, LitMLP()) == run(5, LitMLP()) == [1, 1]  # the loss, once, when a client is done
        watched = LitMLP()
        watched.reads_itself = True
        assert run(1, watched) == [1 + 4, 1 + 4]  # 20 examples in batches of 5: the count is not blind
