"""HeteroFL's average over the clients that have a class, against a slow loop."""

from functools import partial
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from masked_heads import OWN, LitHead, clients, present
from torch import nn
from torch.nn import functional as F
from toy_models import plain_sgd, variant
from width_norms import recorded_turns

import lightning_spectral as ls


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of three rounds in which all clients take part for two epochs."""
    return partial(fit, max_epochs=3, local_epochs=2)


@pytest.mark.parametrize(("step_widths", "per_width"), [((), False), ((0.5, 1.0), False), ((0.5, 1.0), True)], ids=str)
def test_rows_of_the_head_average_over_those_who_have_the_class(
    step_widths: Any, per_width: bool, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each client's own update, in a slow loop over entries."""
    lit = seeded(LitHead)
    if per_width:
        lit.net[1] = nn.BatchNorm1d(12)
    before = {name: tensor.clone() for name, tensor in lit.state_dict().items()}
    turns = recorded_turns(monkeypatch)
    algorithm = ls.WidthSharding(keep_ratio={0.5: 0.5, 1.0: 0.5}, step_widths=step_widths, averages_per_width=per_width)
    data = clients(drop_last=per_width)  # BatchNorm refuses a batch of one, and has large gradients with two
    hooks = [ls.MaskedLogits(), ls.GradientClip(1.0)]
    fitted = fit(lit, data, algorithm=algorithm, local_hooks=hooks, max_epochs=1)
    assert len(turns) == 4
    for name, inputs in (("head.weight", True), ("head.bias", False)):
        expected = before[name].double()
        diluted = 0.0
        for row in range(5):
            for column in range(12) if inputs else [None]:
                at = row if column is None else (row, column)
                holders = [
                    (r.unit.coefficient, float(t[name][at] - before[name][at]), row in OWN[r.unit.client_id])
                    for r, t in turns
                    if column is None or column < t[name].shape[1]
                ]
                own = [(weight, change) for weight, change, has_class in holders if has_class]
                if own:
                    mean = sum(w * c for w, c in own) / sum(w for w, _ in own)
                    diluted = max(diluted, abs(mean - sum(w * c for w, c, _ in holders) / sum(w for w, *_ in holders)))
                    expected[at] += mean
        # float32 weights of order one: an eighth of the rounding of sums
        torch.testing.assert_close(fitted.state[name].double(), expected, rtol=0.0, atol=2.0**-23)
        assert torch.equal(fitted.state[name][4], before[name][4])  # a class that no client has
        assert diluted > 1e-3


def test_decay_does_not_reach_rows_of_classes_that_nobody_has(fit: Fit) -> None:
    LitDecay = variant(LitHead, configure_optimizers=plain_sgd(0.3, weight_decay=0.1))
    options: dict[str, Any] = {"local_hooks": [ls.MaskedLogits()]}
    lit = seeded(LitDecay)
    kept = fit(lit, clients(), algorithm=ls.WidthSharding(keep_ratio=1.0), **options).state["head.weight"][4]
    assert torch.equal(kept, seeded(LitDecay).head.weight[4])
    assert not torch.equal(fit(seeded(LitDecay), clients(), **options).state["head.weight"][4], kept)


def test_fewer_entries_are_counted_as_held(fit: Fit) -> None:
    entries = sum(parameter.numel() for parameter in LitHead().parameters())
    (row,) = fit(
        seeded(LitHead),
        clients(),
        algorithm=ls.WidthSharding(keep_ratio=1.0),
        local_hooks=[ls.MaskedLogits()],
        max_epochs=1,
    ).rows
    assert row["fl/entries_held"] == 1 - 13 / entries


def test_a_tied_weight_is_trained_elsewhere() -> None:
    lit = LitHead()
    lit.other = nn.Linear(12, 5)
    lit.other.weight = lit.head.weight
    rows = ls.MaskedLogits().untrained_rows(lit, present(0, 2))
    assert {name: found.tolist() for name, found in rows.items()} == {"head.bias": [1, 3, 4]}


def test_a_client_whose_labels_are_all_ignored_trains_no_row(fit: Fit) -> None:
    data = clients([(0, 1), (-100,), (2,), (3, 4)])
    options = {
        "algorithm": ls.WidthSharding(keep_ratio=1.0),
        "local_hooks": [ls.MaskedLogits()],
        "local_epochs": 1,
    }

    lit = seeded(variant(LitHead, loss=lambda self, logits, y, client_id: F.cross_entropy(logits, y, reduction="sum")))
    assert torch.isfinite(fit(lit, data, max_epochs=1, **options).weights).all()
