"""Optimizers, schedules and trainable parameters of users' modules."""

from typing import Any

import pytest
import torch
from federation import Fit
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import lightning_spectral as ls


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


@pytest.mark.parametrize("form", optimizer_forms(nn.Linear(1, 1)).keys())
def test_every_form_of_configure_optimizers(form: str, lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return optimizer_forms(self)[form]

    expected = [1.0, 1.0, 1.0]
    if "lists" in form or "scheduler" in form or form in ("nested", "dicts"):
        expected = [1.0, 1.0, 0.5] if form == "lists of dicts" else [1.0, 0.5, 0.25]
    assert fit(Lit(), data, max_epochs=3).history.column("fl/lr") == expected


def test_learning_rate_of_a_round_reaches_the_clients(lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: list[float] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])
            assert self.optimizers() is optimizer

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, 1, 0.5)]

    fit(Lit(), data, max_epochs=2)
    assert seen == [1.0] * (len(seen) // 2) + [0.5] * (len(seen) // 2)


def test_plateau_scheduler_waits_for_its_metric(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    assert fit(Lit(), data, max_epochs=3).history.column("fl/lr") == [1.0, 1.0, pytest.approx(0.1)]
    data.val = None
    with pytest.raises(ValueError, match="monitors 'val_loss', which was not logged in round 0"):
        fit(Lit(), data)


def test_a_metric_that_may_be_missing_is_waited_for(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "never", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    assert fit(Lit(), data).history.column("fl/lr") == [1.0, 1.0]


def test_estimated_steps_are_rounds(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
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
    assert fit(Lit(), data, max_epochs=4).history.column("fl/lr") == expected


def test_parameters_left_out_of_the_optimizer_stay(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            chosen = [p for name, p in self.named_parameters() if name.endswith("weight")]
            return torch.optim.Adam(chosen, lr=0.1)

    module = Lit()
    ls.spectral_start(module, 0.5)  # now, so that only training changes the weights
    bias, weight = module.net[2].bias.detach().clone(), module.net[2].weight.detach().clone()
    sharding = ls.SpectralSharding(keep_ratio=0.5, clip_tau=float("inf"))  # Adam would undo clipping
    fit(module, data, algorithm=sharding)
    assert torch.equal(module.net[2].bias, bias)
    assert not torch.equal(module.net[2].weight, weight)


def test_frozen_parameters_stay_and_travel_down_only(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = lit_mlp()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    ledger = fit(module, data, algorithm=ls.FedAvg(), max_epochs=1).ledger
    assert torch.equal(module.net[0].weight, before)
    assert ledger.rows[0].downlink_bytes - ledger.rows[0].uplink_bytes == 4 * (6 * 12 + 12)


def test_hooks_on_the_users_optimizer_are_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.register_step_post_hook(lambda *args: None)
            return optimizer

    with pytest.raises(ValueError, match="SGD has step hooks, which are not copied to the optimizers of clients"):
        fit(Lit(), data)


def test_a_parameter_left_out_is_left_alone_by_the_server_too(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.net[2].weight], lr=0.1)

    module = Lit()
    before = module.net[0].weight.detach().clone()
    fit(module, data, server_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5))
    assert torch.equal(module.net[0].weight, before)


def test_gradients_from_before_the_fit_are_not_mistaken_for_a_leak(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.net[2].weight], lr=0.1)

    module = Lit()
    data.val = None  # Lightning clears gradients before it validates
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    for _ in range(2):
        fit(module, data, max_epochs=1)
        assert all(parameter.grad is None for parameter in module.parameters())


def test_clipping_the_weight_of_a_sharded_layer_is_an_error_that_names_it(lit_mlp: Any, data: Any, fit: Fit) -> None:
    class Critic(lit_mlp):  # type: ignore[misc]
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            for layer in self.net:
                if hasattr(layer, "weight"):
                    layer.weight.data.clamp_(-0.01, 0.01)

    with pytest.raises(ls.ClientError, match=r"`net.2.weight` cannot be written.*exclude=\['net.2'\]"):
        fit(Critic(), data)
    excluded = ls.SpectralSharding(layers=ls.LayerChoices(keep_first_and_last_dense=False, exclude=["net.2"]))
    with pytest.raises(ls.ClientError, match=r"`net.0.weight` cannot be written"):
        fit(Critic(), data, algorithm=excluded)
    clipped = fit(Critic(), data, algorithm=ls.FedAvg()).module.net[2].weight
    assert float(clipped.detach().abs().max()) <= 0.0101
