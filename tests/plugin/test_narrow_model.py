"""Models of one width, extracted from a module trained by clients of several widths."""

import copy
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, same_state, seeded
from width_norms import WIDTHS, LitNorms, cut, ours, randomised

import lightning_spectral as ls


def narrow_by_hand(fitted: Any, width: float) -> Any:
    """The whole module cut to the width, with the averages that the state holds for it."""
    small = cut(fitted.module, ls.nn.width_plan(fitted.module), width)
    small.load_state_dict(fitted.model.state.widths.get(width, {}), strict=False)
    return small


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_narrow_model_has_the_averages_of_its_width(width: float, data: Any, fit: Fit, quiet: Any) -> None:
    fitted = fit(seeded(LitNorms), data, algorithm=ours(), clients_per_round=6, max_epochs=2)
    before = copy.deepcopy(fitted.tensors)
    small = ls.algorithms.narrow_model(fitted.model, width)
    assert type(small) is LitNorms
    assert small.net[0].out_features == small.net[1].num_features == 12 * width
    assert same_state(small.state_dict(), narrow_by_hand(fitted, width).state_dict())
    loader = data.val_dataloader()
    (metrics,) = pl.Trainer(**quiet).validate(small, loader, verbose=False)
    by_hand = narrow_by_hand(fitted, width).eval()
    x, y = map(torch.cat, zip(*loader, strict=True))
    assert metrics["val_acc"] == pytest.approx(float((by_hand(x).argmax(1) == y).float().mean()))
    with torch.no_grad():
        small.net[0].weight.zero_()
    small.net[1].running_mean.zero_()
    assert same_state(fitted.tensors, before)


def test_without_averages_of_its_own_a_narrow_model_has_the_first_of_the_whole(data: Any, fit: Fit) -> None:
    for algorithm in (ls.WidthSharding(keep_ratio=0.5), ours(averages_per_width=False)):
        fitted = fit(seeded(LitNorms), data, algorithm=algorithm, clients_per_round=6)
        expected = cut(fitted.module, ls.nn.width_plan(fitted.module), 0.3)
        assert same_state(ls.algorithms.narrow_model(fitted.model, 0.3).state_dict(), expected.state_dict())


def test_a_narrow_model_can_be_saved_and_is_the_same_from_a_checkpoint(data: Any, fit: Fit, tmp_path: Path) -> None:
    fitted = fit(seeded(LitNorms), data, algorithm=ours(), clients_per_round=6)
    fitted.trainer.save_checkpoint(tmp_path / "last.ckpt")
    built = {"module": LitNorms(), "algorithm": ours(), "clients_per_round": 6}
    again = ls.FederatedModule.load_from_checkpoint(tmp_path / "last.ckpt", **built)
    small, loaded = (ls.algorithms.narrow_model(model, 0.5) for model in (fitted.model, again))
    assert same_state(small.state_dict(), loaded.state_dict())
    buffer = io.BytesIO()
    torch.save(small, buffer)
    buffer.seek(0)
    unpickled = torch.load(buffer, weights_only=False)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpickled.eval()(x), small.eval()(x))


def test_before_the_first_fit_averages_are_the_modules_own() -> None:
    model = ls.FederatedModule(seeded(LitNorms), algorithm=ours(), clients_per_round=2)
    model.module.load_state_dict(randomised(LitNorms(), 3).state_dict())
    expected = cut(model.module, ls.nn.width_plan(model.module), 0.5)
    assert same_state(ls.algorithms.narrow_model(model, 0.5).state_dict(), expected.state_dict())


@pytest.mark.slow
def test_averages_of_a_width_are_those_of_its_activations(data: Any, fit: Fit) -> None:
    """With constant weights, these averages come close to the truth; those of the whole module do not."""
    lit = seeded(LitNorms)
    lit.hparams.lr = 0.0
    fitted = fit(lit, data, algorithm=ours({1.0: 1.0}), clients_per_round=12, max_epochs=8, local_epochs=3)
    own, shared = (
        ls.algorithms.narrow_model(fitted.model, 0.25),
        cut(fitted.module, ls.nn.width_plan(fitted.module), 0.25),
    )
    true = copy.deepcopy(own)
    true.net[1].momentum = 1.0
    true.train()(torch.cat([x for x, _ in data.val_dataloader()]))
    errors = [float((small.net[1].running_mean - true.net[1].running_mean).square().sum()) for small in (own, shared)]
    assert errors[0] < 0.1 * errors[1]


@pytest.mark.parametrize(
    ("algorithm", "width", "message"),
    [
        (ls.FedAvg(), 0.5, "with WidthSharding trains models by width, got FedAvg; train with algorithm=WidthSharding"),
        (
            ls.WidthSharding(ls.RandomChannels()),
            0.5,
            "which RandomChannels\\(\\) does not train alone; train with PrefixChannels",
        ),
        (
            ls.WidthSharding(scaler=True, keep_ratio=1.0),
            0.5,
            "With `scaler` clients train outputs that are divided, .*; train with scaler=False",
        ),
        (ls.WidthSharding(), 1.5, r"`width` must be in \(0, 1\], got 1.5"),
    ],
    ids=repr,
)
def test_what_has_no_narrow_models_is_refused(algorithm: Any, width: float, message: str) -> None:
    model = ls.FederatedModule(seeded(LitNorms), algorithm=algorithm, clients_per_round=1)
    with pytest.raises(ValueError, match=message):
        ls.algorithms.narrow_model(model, width)


def test_a_width_without_averages_is_refused(data: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitNorms), data, algorithm=ours())
    with pytest.raises(ValueError, match=r"`width=0.3` has no running averages: .*`step_widths=\(0.25, 0.5, 0.75"):
        ls.algorithms.narrow_model(fitted.model, 0.3)


def test_widths_that_no_client_trains_are_named(data: Any, fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fitted = fit(seeded(LitNorms), data, algorithm=ours(keep_ratio={0.25: 0.5, 0.5: 0.5}), max_epochs=1)
    assert "No client trains the channels above keep ratio 0.5" in caplog.text
    with pytest.warns(ls.SpectralWarning, match=r"No client trains the channels of width 0\.75 above 0\.5, "):
        ls.algorithms.narrow_model(fitted.model, 0.75)
    ls.algorithms.narrow_model(fitted.model, 0.5)
