"""The spectral start as a function: which matrices it changes, into what, that it does so once, and its report."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from federation import same_state, seeded
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.functional.spectra import num_terms_for

Rows = tuple[str, int, int]  # a weight, the first row of its matrix and the one after its last
KEEP = 0.2


def between(core: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A layer between a first and a last one, which stay dense, with everything else a module may have."""
    return nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), core, nn.LayerNorm(7), nn.Linear(7, 7)).to(dtype)


CORES: dict[str, tuple[Any, dict[str, Rows]]] = {
    "linear": (lambda: nn.Linear(15, 20), {"2": ("2.weight", 0, 20)}),
    "conv": (lambda: nn.Conv2d(3, 16, 3), {"2": ("2.weight", 0, 16)}),
    "grouped": (
        lambda: nn.Conv2d(6, 24, 3, groups=2),
        {"2.blocks.0": ("2.weight", 0, 12), "2.blocks.1": ("2.weight", 12, 24)},
    ),
    "attention": (
        lambda: nn.MultiheadAttention(16, 4),
        {
            **{f"2.blocks.{part}": ("2.in_proj_weight", 16 * i, 16 * i + 16) for i, part in enumerate("qkv")},
            "2.out_proj": ("2.out_proj.weight", 0, 16),
        },
    ),
    "lstm": (
        lambda: nn.LSTM(12, 9),
        {
            f"2.blocks.{name}_{gate}": (f"2.{name}", 9 * i, 9 * i + 9)
            for name in ("weight_ih_l0", "weight_hh_l0")
            for i, gate in enumerate("ifgo")
        },
    ),
}


def slow_start(weight: Tensor, tail: float, keep_ratio: float) -> tuple[np.ndarray[Any, Any], float]:
    """The sum of one singular term after another, and how far it may be off, in units of rounding."""
    U, s, Vh = np.linalg.svd(weight.double().flatten(1).numpy(), full_matrices=False)
    n = math.ceil(keep_ratio * len(s))
    factors = [1.0 if i < n else tail for i in range(len(s))]
    scale = math.sqrt(sum(s**2) / sum((factor * value) ** 2 for factor, value in zip(factors, s, strict=True)))
    total = sum(scale * factors[i] * s[i] * np.outer(U[:, i], Vh[i]) for i in range(len(s)))
    # A perturbation E turns the first n vectors by |E| / gap, which moves weight between the two factors.
    gap = 1 + s[0] / (s[n - 1] - s[n])
    return total, 4 * scale * len(s) * gap * float(np.linalg.norm(s))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tail", [0.0, 0.1])
@pytest.mark.parametrize("name", CORES)
def test_each_block_is_the_slow_sum_of_its_terms_and_nothing_else_changes(name: str, tail: float, dtype: Any) -> None:
    make, blocks = CORES[name]
    module = between(seeded(make), dtype)
    before = copy.deepcopy(module.state_dict())
    report = ls.algorithms.spectral_start(module, KEEP, tail=tail)
    assert set(report.changed) == set(blocks)
    assert report.kept == []
    after = module.state_dict()
    for weight, first, end in blocks.values():
        old, new = before[weight][first:end], after[weight][first:end].double().flatten(1).numpy()
        slow, room = slow_start(old, tail, KEEP)
        assert np.linalg.norm(new - slow) <= room * torch.finfo(dtype).eps
        assert np.linalg.norm(new - old.double().flatten(1).numpy()) > 0.1 * np.linalg.norm(new)  # negative control
    untouched = set(before) - {weight for weight, _, _ in blocks.values()}
    assert {"0.weight", "0.bias", "1.running_mean", "1.weight", "3.weight", "4.weight"} < untouched
    assert same_state({key: before[key] for key in untouched}, {key: after[key] for key in untouched})


def test_layers_that_the_choices_leave_dense_are_untouched() -> None:
    module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
    before = copy.deepcopy(module.state_dict())
    assert ls.algorithms.spectral_start(module, KEEP, layers=ls.LayerChoices(exclude=["2"])).changed == ["1", "3"]
    assert {key for key in before if not torch.equal(before[key], module.state_dict()[key])} == {"1.weight", "3.weight"}
    every = ls.validate(module, layers=ls.LayerChoices(keep_first_and_last_dense=False))
    assert ls.algorithms.spectral_start(module, KEEP, layers=every).changed == ["0", "2", "4"]


def test_terms_are_rounded_up_as_they_are_for_clients() -> None:
    module = seeded(lambda: nn.Sequential(*[nn.Linear(20, 20) for _ in range(3)]).double())
    ls.algorithms.spectral_start(module, 0.1, tail=0.0, layers=ls.LayerChoices(term_granularity=4))
    assert int(torch.linalg.matrix_rank(module[1].weight)) == num_terms_for(20, 0.1, granularity=4) == 4


def trained_in_the_middle() -> nn.Sequential:
    """A second layer with a term that no random matrix has."""
    module = seeded(lambda: nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)]))
    with torch.no_grad():
        module[1].weight += 0.5
    return module


def test_only_random_matrices_are_changed_and_the_report_names_the_others() -> None:
    module = trained_in_the_middle()
    before = copy.deepcopy(module.state_dict())
    report = ls.algorithms.spectral_start(module, KEEP)
    assert (report.keep_ratio, report.changed, report.kept) == (KEEP, ["2"], ["1"])
    assert {key for key in before if not torch.equal(before[key], module.state_dict()[key])} == {"2.weight"}
    squares = torch.linalg.svdvals(before["2.weight"].double()) ** 2
    held = float(squares[:5].sum() / squares.sum())  # 20 % of 24 terms, rounded up
    assert report.held == pytest.approx(held, rel=1e-6)  # float32 rounds the matrix, not its squares' shares
    assert str(report) == (
        f"Spectral start: the energy of 1 of 2 sharded matrices is now in 20% of the terms, which held {held:.0%} of "
        "it; left as they are, because they look trained or have nothing to move: 1."
    )


def test_trained_weights_are_changed_on_request() -> None:
    module = trained_in_the_middle()
    before = module[1].weight.detach().clone()
    report = ls.algorithms.spectral_start(module, KEEP, trained=True)
    assert (report.changed, report.kept) == (["1", "2"], [])
    slow, room = slow_start(before, 0.1, KEEP)
    assert np.linalg.norm(module[1].weight.detach().double().numpy() - slow) <= room * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("options", [{"keep_ratio": 1.0}, {"keep_ratio": KEEP, "tail": 1.0}])
@pytest.mark.parametrize("trained", [False, True])
def test_with_nothing_to_move_no_bit_changes(options: dict[str, float], trained: bool) -> None:
    module = trained_in_the_middle()
    before = copy.deepcopy(module.state_dict())
    assert ls.algorithms.spectral_start(module, trained=trained, **options).kept == ["1", "2"]
    assert same_state(module.state_dict(), before)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("tail", [0.0, 0.1])
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("width", [6, 12, 40])
def test_a_second_start_changes_nothing(width: int, keep: float, tail: float, trained: bool, dtype: Any) -> None:
    module = seeded(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])).to(dtype)
    assert ls.algorithms.spectral_start(module, keep, tail=tail).changed == ["1", "2"]
    before = copy.deepcopy(module.state_dict())
    assert ls.algorithms.spectral_start(module, keep, tail=tail, trained=trained).kept == ["1", "2"]
    assert same_state(module.state_dict(), before)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused_with_the_layers_name(broken: float) -> None:
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    with torch.no_grad():
        module[1].weight[2, 3] = broken
    with pytest.raises(ValueError, match=r"Layer '1' cannot be factorised: .*must be finite"):
        ls.algorithms.spectral_start(module, KEEP)


@pytest.mark.parametrize(
    "make",
    [
        ls.SpectralStart,
        lambda **options: ls.algorithms.spectral_start(between(nn.Linear(7, 7)), **{"keep_ratio": 0.5, **options}),
    ],
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": 1.5}, r"`tail` must be in \[0, 1\], got 1.5"),
        ({"keep_ratio": 0.0}, r"`keep_ratio` must be in \(0, 1\](, or None)?, got 0.0"),
        ({"keep_ratio": 1.5}, r"`keep_ratio` must be in \(0, 1\](, or None)?, got 1.5"),
    ],
)
def test_out_of_range_is_an_error(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)
