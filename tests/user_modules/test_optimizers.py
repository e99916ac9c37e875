"""Optimizers, schedules and trainable parameters of users' modules."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import Fit
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from toy_models import LitSmall, variant

import lightning_spectral as ls


def with_optimizer(lit_mlp: Any, configure: Callable[[Any], Any]) -> Any:
    """The usual module with another ``configure_optimizers``."""
    return variant(lit_mlp, configure_optimizers=configure)()


def with_sgd(lit_mlp: Any, parameters: Callable[[Any], Any], lr: float = 0.1) -> Any:
    """The usual module, of which SGD gets some parameters."""
    return with_optimizer(lit_mlp, lambda self: torch.optim.SGD(parameters(self), lr=lr))


def optimizer_forms(module: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    return {
        "optimizer": optimizer,
        "list": [optimizer],
        "lists": ([optimizer], [schedule]),
        "list and scheduler": ([optimizer], schedule),
        "dict": {"optimizer": optimizer},
        "dict and scheduler": {"optimizer": optimizer, "lr_scheduler": schedule},
        "nested": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}},
        "dicts": [{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}],
        "lists of dicts": ([optimizer], [{"scheduler": schedule, "frequency": 2}]),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", optimizer_forms(nn.Linear(1, 1)).keys())
def test_every_form_of_configure_optimizers(form: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    expected = [1.0, 1.0, 1.0]
    if "lists" in form or "scheduler" in form or form in ("nested", "dicts"):
        expected = [1.0, 1.0, 0.5] if form == "lists of dicts" else [1.0, 0.5, 0.25]
    lit = with_optimizer(lit_mlp, lambda self: optimizer_forms(self)[form])
    assert fit(lit, data, max_epochs=3).history.column("fl/lr") == expected


def on_plateau(lit_mlp: Any, monitor: str | None, **options: Any) -> Any:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": monitor, **options}}

    return with_optimizer(lit_mlp, configure_optimizers)


def test_plateau_scheduler_waits_for_its_metric(lit_mlp: Any, data: Any, fit: Fit) -> None:
    rates = fit(on_plateau(lit_mlp, "val_loss"), data, max_epochs=3).history.column("fl/lr")
    assert rates == [1.0, 1.0, pytest.approx(0.1)]
    assert fit(on_plateau(lit_mlp, "never", strict=False), data).history.column("fl/lr") == [1.0, 1.0]
    data.val = None
    with pytest.raises(ValueError, match="monitors 'val_loss', which was not logged in round 0"):
        fit(on_plateau(lit_mlp, "val_loss"), data)


def test_a_schedule_of_ones_own_waits_for_its_metric(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[Any] = []

    class OnMetric(StepLR):
        def step(self, metrics: Any = None) -> None:
            seen.append(metrics)
            super().step()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = {"scheduler": OnMetric(optimizer, 1), "reduce_on_plateau": True, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    history = fit(with_optimizer(lit_mlp, configure_optimizers), data).history
    assert seen == [None, *history.column("val_loss")]  # the first step is that of its constructor


def test_a_schedule_without_the_metric_that_it_waits_for_is_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    lit = on_plateau(lit_mlp, None)
    with pytest.raises(ValueError, match=r"returned a ReduceLROnPlateau without the metric that it waits for; return"):
        fit(lit, data)


def test_estimated_steps_are_rounds(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def one_cycle(self: Any) -> Any:
        assert self.trainer.estimated_stepping_batches == 4
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    expected = []
    for _ in range(4):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        if len(expected) < 4:
            schedule.step()
    assert fit(with_optimizer(lit_mlp, one_cycle), data, max_epochs=4).history.column("fl/lr") == expected


def test_frozen_parameters_stay_and_travel_down_only(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = lit_mlp()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    ledger = fit(module, data, algorithm=ls.FedAvg(), max_epochs=1).ledger
    assert torch.equal(module.net[0].weight, before)
    assert ledger.rows[0].downlink_bytes - ledger.rows[0].uplink_bytes == 4 * (6 * 12 + 12)


@pytest.mark.parametrize(
    ("keep", "place"),
    [
        (lambda lit, layer: setattr(lit, "layers", [nn.ReLU(), layer]), r", in `self\.layers\[1\]\.weight`;"),
        (lambda lit, layer: setattr(lit.net[2], "of", {"a": (layer,)}), r", in `self\.net\.2\.of\['a'\]\[0\]\.weight`"),
        (lambda lit, layer: FOREIGN.append(layer), r", in `FOREIGN\[0\]\.weight`;"),
        (lambda lit, layer: None, r"; parameter 1 of"),
    ],
    ids=["list", "inside", "global", "unknown"],
)
def test_an_optimizer_with_foreign_parameters_is_refused_with_their_place(
    keep: Any, place: str, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    def configure_optimizers(self: Any) -> Any:
        layer = nn.Linear(3, 4)
        keep(self, layer)
        FOREIGN[1:] = []  # a variable that this function uses
        return torch.optim.SGD([{"params": self.parameters()}, {"params": layer.parameters()}], lr=0.1)

    FOREIGN.clear()
    with pytest.raises(ValueError, match=rf"^Parameters of SGD are not Lit's, .* of group 1, of shape \(4, 3\){place}"):
        fit(with_optimizer(lit_mlp, configure_optimizers), data)


FOREIGN: list[nn.Module] = []


def test_tied_weights_a_loss_of_the_modules_and_frozen_foreign_parameters_are_no_foreign_ones(
    lit_mlp: Any, data: Any, fit: Fit
) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(3, 3)
            self.alias = self.net[2]  # the same parameters under another name
            self.teacher = [nn.Linear(3, 3).requires_grad_(False)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.loss(self(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            tied = [*self.net.parameters(), self.alias.weight, *self.loss.parameters(), *self.teacher[0].parameters()]
            return torch.optim.SGD(list(dict.fromkeys(tied)), lr=0.1)

    before = (module := Lit()).loss.weight.detach().clone()
    fit(module, data, algorithm=ls.FedAvg())
    assert not torch.equal(module.loss.weight, before)


def test_a_parameter_left_out_is_left_alone_by_the_server_too(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_sgd(lit_mlp, lambda self: [self.net[2].weight])
    module.net[2].bias.data.fill_(0.5)
    before = copy.deepcopy(module.net)
    fit(module, data, server_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5))
    assert torch.equal(module.net[0].weight, before[0].weight)
    assert torch.equal(module.net[2].bias, before[2].bias)
    assert not torch.equal(module.net[2].weight, before[2].weight)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*no client has given a gradient")
@pytest.mark.parametrize(
    "algorithm",
    [ls.FedAvg(), ls.SpectralSharding(), ls.SpectralSharding.published(), ls.FIARSE(), ls.WidthSharding()],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_layers_left_out_of_the_optimizer_keep_the_servers_value_bit_for_bit(
    algorithm: Any, data: Any, fit: Fit
) -> None:
    module = with_sgd(LitSmall, lambda self: self.net[6].parameters())
    before = copy.deepcopy(module.net)
    fit(module, data, algorithm=algorithm)
    for name, value in module.net.named_parameters():
        assert torch.equal(value, before.get_parameter(name)) != name.startswith("6."), name


def test_a_layer_left_out_is_dense_on_clients_and_the_spectral_start_says_nothing_of_it(
    lit_mlp: Any, data: Any, fit: Fit
) -> None:
    lit = with_sgd(lit_mlp, lambda self: [*self.net[4].parameters(), self.net[2].bias])
    lit.net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 3))
    before = copy.deepcopy(lit.net)
    fitted = fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5))
    assert list(fitted.model.algorithm.plan(lit).sharded) == [f"net.{i}" for i in range(1, 5)]  # as far as it knows
    whole, shard = 4 * 6 * 6, 4 * 3 * 13  # bytes of a matrix, and of three terms with multipliers
    biases, ends = 4 * (5 * 6 + 3), 4 * (36 + 18)
    assert fitted.ledger.rows[0].downlink_bytes == 3 * whole + shard + biases + ends
    assert not torch.equal(lit.net[4].weight, before[4].weight)
    assert not torch.equal(lit.net[2].bias, before[2].bias)


def test_gradients_from_before_the_fit_are_not_mistaken_for_a_leak(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_sgd(lit_mlp, lambda self: [self.net[2].weight])
    data.val = None  # Lightning clears gradients before it validates
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    for _ in range(2):
        fit(module, data, max_epochs=1)
        assert all(parameter.grad is None for parameter in module.parameters())


def test_clipping_the_weight_of_a_sharded_layer_is_an_error_that_names_it(lit_mlp: Any, data: Any, fit: Fit) -> None:
    def clip_weights(self: Any, *args: Any) -> None:
        for layer in self.net:
            if hasattr(layer, "weight"):
                layer.weight.data.clamp_(-0.01, 0.01)

    critic = variant(lit_mlp, on_train_batch_end=clip_weights)
    with pytest.raises(ls.ClientError, match=r"`net.2.weight` cannot be written.*exclude=\['net.2'\]"):
        fit(critic(), data)
    excluded = ls.SpectralSharding(layers=ls.LayerChoices(keep_first_and_last_dense=False, exclude=["net.2"]))
    with pytest.raises(ls.ClientError, match=r"`net.0.weight` cannot be written"):
        fit(critic(), data, algorithm=excluded)
    assert float(fit(critic(), data, algorithm=ls.FedAvg()).module.net[2].weight.detach().abs().max()) <= 0.0101


class OwnRate(torch.optim.Optimizer):
    """Chooses its learning rate itself, as Adafactor can; its option is then ``None``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.sub_(parameter.grad.sign(), alpha=1e-3)
        return loss


def test_an_optimizer_that_chooses_its_own_rate_trains_and_logs_nan(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = with_optimizer(lit_mlp, lambda self: OwnRate(self.parameters()))
    before = module.net[5].weight.detach().clone()
    assert all(math.isnan(rate) for rate in fit(module, data, algorithm=ls.FedAvg()).history.column("fl/lr"))
    assert not torch.equal(module.net[5].weight, before)
