"""Hooks for clients with few labels: against steps written out, in runs, and the remark that names them."""

import contextlib
import math
import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, same_state, seeded
from masked_heads import ALGORITHMS, OWN, LitHead, check_by_hand, clients, device_of, present, train_by_hand, turn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from toy_models import toy_examples

import lightning_spectral as ls
from lightning_spectral.client import CalibratedLogits, FixedBatchNorm, GradientClip
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.protocol.records import Download, WorkUnit


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=1, local_epochs=2)


def shift_by_hand(counts: list[int], weight: float) -> Tensor:
    """The terms that are added to the logits of each class, from the formula."""
    total, classes = sum(counts), len(counts)
    return torch.tensor([weight * math.log((count + 0.1) / (total + 0.1 * classes)) for count in counts])


class LitShifted(LitHead):
    """Adds the shift of round 0 by hand: three examples of each of a client's classes."""

    def loss(self, logits: Tensor, y: Tensor, client_id: int) -> Tensor:
        return F.cross_entropy(logits + shift_by_hand([3 * (c in OWN[client_id]) for c in range(5)], 1.0), y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*ALGORITHMS, "width"])
def test_a_round_is_that_of_a_module_that_shifts_by_hand(name: str, fit: Fit) -> None:
    algorithm = ALGORITHMS.get(name, ls.WidthSharding(keep_ratio=0.5))
    check_by_hand(fit, LitShifted, CalibratedLogits(rounds=1), algorithm=algorithm)


@pytest.mark.parametrize(("round_idx", "weight"), [(0, 1.0), (3, math.cos(0.15 * math.pi) ** 2), (5, 0.5), (10, 0.0)])
def test_the_shift_falls_with_half_a_cosine(round_idx: int, weight: float) -> None:
    """After the last round the client trains to the bit as it would without the hook."""
    data, lit, hook = clients(), seeded(LitHead), CalibratedLogits(rounds=10)
    asked = Download(WorkUnit(0), 1.0, {}, round_idx)
    ours = turn(device_of(seeded(LitHead), data, hook), asked)
    train_by_hand(lit, data, asked, lambda logits: logits + shift_by_hand([3, 3, 0, 0, 0], weight))
    # the weight of the shift is rounded once, and the shift once: differences of some 1e-8
    torch.testing.assert_close(dict(ours.tensors), dict(lit.state_dict()), rtol=0.0, atol=1e-6)
    plain = turn(device_of(seeded(LitHead), data), asked)
    assert same_state(dict(ours.tensors), dict(plain.tensors)) is (weight == 0.0)


@pytest.mark.parametrize("layer", [nn.Linear(2, 3), nn.Conv1d(2, 3, 1), nn.Conv2d(2, 3, 1)])
def test_classes_are_where_a_layer_has_its_outputs(layer: Any) -> None:
    size = {nn.Linear: (4, 7, 2), nn.Conv1d: (4, 2, 7), nn.Conv2d: (4, 2, 7, 5)}[type(layer)]
    x, labels = torch.randn(size), torch.tensor([0, 0, 2, -1])
    data = ClientData(BatchSource(TensorDataset(labels)), torch.arange(4), 4, 0, (0, 0), labels=lambda: labels)
    with torch.no_grad(), CalibratedLogits("", rounds=8).while_training(layer, data):
        shifted = layer(x)
    dim = 2 if isinstance(layer, nn.Linear) else 1
    added = np.moveaxis((shifted - layer(x)).detach().numpy(), dim, -1).reshape(-1, 3)
    assert added == pytest.approx(np.tile(shift_by_hand([2, 0, 1], 1.0).numpy(), (len(added), 1)), abs=1e-6)


class LitNorm(LitHead):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh())


@pytest.mark.parametrize("round_idx", [3, 4])
def test_fixed_layers_normalise_by_the_servers_averages(round_idx: int) -> None:
    """Before the round, clients train as they do without the hook; then with the layer in eval mode."""
    data = clients()

    def server() -> LitNorm:
        lit = seeded(LitNorm)
        lit.net[1].running_mean.fill_(0.5)
        return lit

    trained, lit = server(), server()
    asked = Download(WorkUnit(3), 1.0, {}, round_idx)
    ours = turn(device_of(trained, data, FixedBatchNorm(4)), asked)
    lit.net[1].train(round_idx < 4)
    train_by_hand(lit, data, asked)
    assert same_state(dict(ours.tensors), {name: lit.state_dict()[name] for name in ours.tensors})
    assert bool((lit.net[1].running_mean == 0.5).all()) is (round_idx == 4)
    assert trained.net[1].training


def test_a_failure_leaves_layers_as_they_were() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval())
    data = present(0)
    data.ids = (7, 0)
    modes = []
    with contextlib.suppress(KeyError), FixedBatchNorm(0).while_training(norm, data):
        modes.append((norm[0].training, norm[1].training))
        raise KeyError
    assert [*modes, (norm[0].training, norm[1].training)] == [(False, False), (True, False)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CalibratedLogits(rounds=0), "`rounds` must be at least 1, got 0"),
        (lambda: FixedBatchNorm(-1), "`from_round` must be at least 0, got -1"),
        (lambda: FixedBatchNorm(0).check(LitHead(), list), "no BatchNorm layer with running averages in LitHead"),
        (lambda: CalibratedLogits("tail", rounds=2).check(LitHead(), list), "CalibratedLogits: LitHead has no layer"),
    ],
)
def test_mistakes_are_named_before_training(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class LitWide(LitHead):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 6)


FEW = [(0, 1), (2,), (3, 4), (0, 1, 2)]


@pytest.mark.parametrize(
    ("lit", "own", "hooks", "said"),
    [
        (LitHead, FEW, [], r"3 of 4 clients have one or two of the 5 labels.*CalibratedLogits\('head', rounds=1\), "),
        (LitNorm, FEW, [GradientClip(1.0)], r"GradientClip\(1\.0\), FixedBatchNorm\(1\)\]"),
        (LitHead, FEW, [CalibratedLogits(rounds=1)], ""),
        (LitHead, [(0, 1, 2), (2,), (3, 4, 1), (0, 1, 2)], [], ""),
        (LitHead, [(0, 1), (2,), (2, 1), (0, 1)], [], ""),  # of three labels
        (LitWide, FEW, [], ""),  # which layer makes the logits is not known
    ],
)
def test_a_run_says_what_helps_clients_with_few_labels(
    lit: Any, own: Any, hooks: Any, said: str, fit: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(seeded(lit), clients(own, drop_last=True), local_hooks=hooks)
    remarks = [record.getMessage() for record in caplog.records if "labels" in record.getMessage()]
    assert len(remarks) == (said != "")
    assert all(re.search(said, remark) for remark in remarks)


def by_capacity(ratios: Any, algorithm: Any = ls.SpectralSharding, **options: Any) -> tuple[Any, Any]:
    """Six clients with the labels 0 and 1, and six with 2: the latter may hold more."""
    toy = toy_examples()
    few, clients = toy.tensors[1] < 2, torch.empty(len(toy), dtype=torch.int64)
    clients[few], clients[~few] = torch.arange(int(few.sum())) % 6, 6 + torch.arange(int((~few).sum())) % 6
    data = ls.FederatedDataModule(toy, ls.NaturalPartitioner(clients, names=range(12)), batch_size=4)
    return data, algorithm(keep_ratio=ratios, **options)


TIED = [0.3] * 6 + [0.8] * 6
BY_TERMS: dict[str, Any] = {"aggregation": ls.algorithms.TermMeans()}


def test_larger_clients_with_other_labels_are_named(fit: Fit, lit_mlp: Any) -> None:
    data, algorithm = by_capacity(TIED, **BY_TERMS)
    with pytest.warns(ls.SpectralWarning, match=r"hold 0\.3 .* other labels .* hold 0\.8 \(the overlap is 0%\)"):
        fit(seeded(lit_mlp), data, algorithm=algorithm)
    data, algorithm = by_capacity(TIED)
    ls.algorithms.spectral_start(trained := seeded(lit_mlp), 0.3)
    with pytest.warns(ls.SpectralWarning, match="have other labels"):  # means of terms, as a start moves nothing
        fit(trained, data, algorithm=algorithm)
    data, algorithm = by_capacity([0.25] * 6 + [0.5] * 6, ls.FIARSE)
    with pytest.warns(ls.SpectralWarning, match="it may forget those of the former. Use one keep ratio for all"):
        fit(seeded(lit_mlp), data, algorithm=algorithm)


@pytest.mark.parametrize(
    ("ratios", "options"),
    [(TIED, {}), (TIED, {"aggregation": ls.algorithms.MatrixMeans()}), (0.3, BY_TERMS), ([0.3, 0.8] * 6, BY_TERMS)],
    ids=["the default", "means of matrices", "equal", "whoever has which labels"],
)
def test_nothing_is_said_of_them_otherwise(ratios: Any, options: Any, fit: Fit, lit_mlp: Any) -> None:
    data, algorithm = by_capacity(ratios, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*have other labels")
        assert len(fit(seeded(lit_mlp), data, algorithm=algorithm).rows) == 1
