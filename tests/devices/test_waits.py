"""How often the host waits for the device in a round: a fixed number of times, however long clients train.

`docs/devices.md` shows these numbers. Fewer are better: lower them here and there.
"""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pretend_device
import pytest
import torch
from federation import Fit, seeded
from pretend_device import WAITS
from torch.utils.data import TensorDataset
from toy_models import LitSmall

import lightning_spectral as ls
from lightning_spectral.functional.spectra import factorize, leading_factors

# waits in a round of four clients, three layers and a BatchNorm, without validation
PER_ROUND: dict[str, tuple[dict[str, Any], int]] = {
    "FedAvg": ({}, 18),
    "largest changes": ({"filters": [ls.TopK(0.1)]}, 127),
    "eight bits": ({"filters": [ls.Int8()]}, 63),
    "SpectralSharding": ({"algorithm": ls.SpectralSharding(keep_ratio=0.5)}, 33),
    "SpectralSharding, averaged by terms": (
        {"algorithm": ls.SpectralSharding(keep_ratio=0.5, aggregation=ls.algorithms.TermMeans())},
        32,
    ),
    "Zampling": ({"algorithm": ls.Zampling(compression=2, degree=3)}, 29),
    "WidthSharding": ({"algorithm": ls.WidthSharding()}, 104),
    "FIARSE": ({"algorithm": ls.FIARSE(keep_ratio=0.5)}, 48),
    "LoRA": ({"algorithm": ls.LoRA(2, train=["net.1.*"])}, 33),
    "Scaffold": ({"algorithm": ls.Scaffold()}, 70),
    "StaleUpdates": ({"algorithm": ls.StaleUpdates()}, 84),
    "FedDyn": ({"algorithm": ls.FedDyn()}, 70),
    "Ditto": ({"algorithm": ls.Ditto()}, 82),
    "QFedAvg": ({"algorithm": ls.QFedAvg()}, 28),
}


class CountWaits(pl.Callback):
    """Counts the waits of every round, with all that Lightning does in it."""

    def __init__(self) -> None:
        self.rounds: list[Counter[str]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch > 0:
            self.rounds.append(Counter(WAITS))
        WAITS.clear()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append(Counter(WAITS))


@pytest.fixture
def data(toy: TensorDataset) -> ls.FederatedDataModule:
    """Clients of one batch: a second local epoch is then all there is of local steps."""
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), batch_size=10)


@pytest.fixture(autouse=True)
def counting(device: Any) -> None:
    if not device.is_pretended:
        pytest.skip("waits are counted on the pretended device; on a GPU use torch.cuda.set_sync_debug_mode")


def waits_of(there: Fit, data: Any, **options: Any) -> Counter[str]:
    """Waits of the second round, which builds nothing that the first has built."""
    count = CountWaits()
    lit = seeded(LitSmall, momentum=0.0)
    options = {"clients_per_round": 4, "max_epochs": 2, **options}
    there(lit, data, callbacks=[count], **options)
    return count.rounds[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PER_ROUND)
def test_waits_are_the_documented_ones_however_many_local_steps(name: str, data: Any, there: Fit) -> None:
    options, expected = PER_ROUND[name]
    one, two = (waits_of(there, data, local_epochs=n, **options) for n in (1, 2))
    assert one == two
    assert one.total() == expected


KEEPING = ("Scaffold", "FedDyn", "Ditto", "StaleUpdates", "largest changes", "eight bits")
# what is kept of a client, at the server or by its simulated device, is moved only if it has taken part before;
# some matrices need a wait more than others
FORGETFUL = [name for name in PER_ROUND if name not in (*KEEPING, "SpectralSharding")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGETFUL)
def test_waits_grow_with_clients_by_a_fixed_number(name: str, data: Any, there: Fit) -> None:
    options, _ = PER_ROUND[name]
    two, four, six = (waits_of(there, data, clients_per_round=n, **options).total() for n in (2, 4, 6))
    assert six - four == four - two


def test_the_first_terms_take_products_and_qr_alone(device: Any) -> None:
    """Two waits for the small problem, which the CPU solves, one for where it begins, and one for what certifies it."""
    values = torch.cat([torch.linspace(10, 1, 4), torch.full((28,), 1e-3)])
    weight = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0))).Q * values
    there = weight.to(pretend_device.NAME)
    WAITS.clear()
    found = leading_factors(there, 4)
    assert WAITS == {"to host": 1, "to device": 2, "item": 1}
    assert found is not None
    torch.testing.assert_close(found[0].s.cpu(), torch.linalg.svdvals(weight.double())[:4])
    WAITS.clear()
    factorize(there)
    assert WAITS["linalg"] > 0


def test_the_device_refuses_what_a_gpu_would_and_counts() -> None:
    here, there = torch.ones(2, 3), torch.ones(2, 3, device=pretend_device.NAME)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        here + there
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    WAITS.clear()
    assert float(there.sum()) == float(there.cpu().sum()) == 6.0
    there.copy_(here, non_blocking=True)
    there[there > 2]
    assert WAITS == {"item": 1, "to host": 1, "nonzero": 1}


def test_a_parameter_of_the_device_takes_other_memory_of_either_device() -> None:
    """And stays the same object, as on a GPU: what refers to it follows."""
    layer = torch.nn.Linear(2, 1, bias=False).to(pretend_device.NAME)
    weight = layer.weight
    first, second = weight.data, torch.zeros(1, 2, device=pretend_device.NAME)
    weight.data = second
    layer(torch.ones(1, 2, device=pretend_device.NAME)).sum().backward()
    weight.data.add_(weight.grad)
    assert second.tolist() == [[1.0, 1.0]]
    weight.grad, weight.data = None, torch.full((1, 2), 3.0)
    assert (layer.weight is weight, type(weight), weight.device.type) == (True, torch.nn.Parameter, "cpu")
    assert layer(torch.ones(1, 2)).tolist() == [[6.0]]
    weight.data = first
    assert (weight.device.type, weight.tolist()) == (pretend_device.NAME, first.tolist())


MOST_KERNELS = {  # in a local step after a client's first, and in a round of three clients outside of steps
    ("MLP", "FedAvg"): (29, 67),
    ("MLP", "sharding at 0.2"): (42, 232),
    ("CNN", "FedAvg"): (30, 111),
    ("CNN", "sharding at 0.2"): (46, 294),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", MOST_KERNELS, ids=" ".join)
def test_rounds_start_no_more_kernels_than_they_did(case: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    kernels = importlib.import_module("kernels")
    _, step, outside = kernels.counted(case[0], kernels.ALGORITHMS[case[1]], num_clients=3)
    most_in_step, most_outside = MOST_KERNELS[case]
    assert 0.9 * most_in_step < sum(step.values()) <= most_in_step  # fewer is a reason to lower the bound
    assert 0.9 * most_outside < outside <= most_outside
