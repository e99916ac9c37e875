"""Clients train in the Trainer's precision; the server does not."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.amp.grad_scaler import GradScaler

import lightning_spectral as ls

ALGORITHMS: list[Any] = [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]


def fit(lit_mlp: Any, data: Any, quiet: dict[str, Any], algorithm: Any, rounds: int = 2, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = lit_mlp()
    history = ls.RoundHistory()
    trainer = pl.Trainer(max_epochs=rounds, **{**quiet, **options, "callbacks": [history]})
    trainer.fit(ls.FederatedModule(module, algorithm=algorithm, clients_per_round=4), data)
    return module, history, trainer


def weights(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


class WithoutAutocast(MixedPrecision):
    """Scales gradients and does nothing else."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**8))

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
class TestEveryAlgorithm:
    def test_gradient_scaling_alone_changes_no_bit(self, algorithm: Any, lit_mlp: Any, data: Any, quiet: Any) -> None:
        """Neither the clients' steps nor the server's, whose pseudo-gradient nobody scaled."""
        plain, *_ = fit(lit_mlp, data, quiet, algorithm)
        plugin = WithoutAutocast()
        scaled, _, trainer = fit(lit_mlp, data, quiet, algorithm, plugins=[plugin])
        assert torch.equal(weights(plain), weights(scaled))
        assert trainer.precision_plugin.scaler is plugin.scaler  # lent back
        assert plugin.scaler.get_scale() == 2.0**8

    @pytest.mark.parametrize("device", DEVICES)
    def test_clients_train_in_half_precision_with_scaled_gradients(
        self, device: str, algorithm: Any, lit_mlp: Any, data: Any, quiet: Any
    ) -> None:
        seen: set[torch.dtype] = set()

        class Lit(lit_mlp):  # type: ignore[misc]
            def forward(self, x: Any) -> Any:
                output = super().forward(x)
                seen.add(output.dtype)
                return output

        plugin = MixedPrecision("16-mixed", device)  # by name, Lightning gives CPUs bf16-mixed instead
        module, history, _ = fit(Lit, data, quiet, algorithm, plugins=[plugin], accelerator=device)
        assert seen == {torch.float16}
        assert all(p.dtype == torch.float32 for p in module.parameters())
        if device == "cpu":  # devices draw differently
            _, full, _ = fit(lit_mlp, data, quiet, algorithm)
            eps = torch.finfo(torch.float16).eps
            assert history.column("fl/loss") == pytest.approx(full.column("fl/loss"), rel=eps)

    def test_losses_are_summed_in_full_precision(self, algorithm: Any, lit_mlp: Any, data: Any, quiet: Any) -> None:
        """bfloat16 has 8 bits: a sum of a hundred numbers that are not would show."""

        class Lit(lit_mlp):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                self.log("third", 1 / 3)
                return loss - loss.detach() + 1 / 3

        data.batch_size = 1
        _, history, _ = fit(Lit, data, quiet, algorithm, precision="bf16-true")
        assert history.column("third") == pytest.approx([1 / 3] * 2, rel=1e-12)
        third = float(torch.tensor(1 / 3, dtype=torch.bfloat16))
        assert history.column("fl/loss") == pytest.approx([third] * 2, rel=1e-12)

    @pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
    def test_losses_differ_by_roundings_of_the_type(
        self, precision: Any, algorithm: Any, lit_mlp: Any, data: Any, quiet: Any
    ) -> None:
        _, history, _ = fit(lit_mlp, data, quiet, algorithm, precision=precision)
        _, full, _ = fit(lit_mlp, data, quiet, algorithm)
        eps = torch.finfo(torch.float32 if precision == "64-true" else torch.bfloat16).eps
        # a round's loss is a mean over sixty examples, whose roundings differ in sign: no more than one is left
        assert history.column("fl/loss") == pytest.approx(full.column("fl/loss"), rel=eps)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_only_forward_passes_have_another_default_type(
    precision: Any, lit_mlp: Any, data: Any, quiet: dict[str, Any]
) -> None:
    seen: dict[str, set[torch.dtype]] = {"forward": set(), "hook": set(), "callback": set()}

    class Lit(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen["forward"].add(torch.get_default_dtype())
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen["hook"].add(torch.get_default_dtype())

    class Spy(ls.RoundCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            seen["callback"].add(torch.get_default_dtype())

    model = ls.FederatedModule(Lit(), clients_per_round=2)
    pl.Trainer(max_epochs=1, precision=precision, callbacks=[Spy()], **quiet).fit(model, data)
    narrow = {"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert seen == {"forward": {narrow}, "hook": {torch.float32}, "callback": {torch.float32}}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
def test_weights_stay_on_the_device_and_are_those_of_the_cpu(
    device: str, algorithm: Any, lit_mlp: Any, data: Any, quiet: dict[str, Any]
) -> None:
    class Lit(lit_mlp):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dropout=0.0)  # devices draw differently

    there, _, trainer = fit(Lit, data, quiet, algorithm, rounds=1, accelerator=device)
    here, *_ = fit(Lit, data, quiet, algorithm, rounds=1)
    assert trainer.strategy.root_device.type == device
    # signs and order of equal singular vectors may differ, what they make does not: float32, one round of a few steps
    torch.testing.assert_close(weights(there).cpu(), weights(here), rtol=1e-4, atol=1e-5)
