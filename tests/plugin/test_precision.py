"""Clients train in the Trainer's precision; the server does not."""

from functools import partial
from typing import Any

import pytest
import torch
from federation import Fit, ScalesAlone, seeded
from lightning.pytorch.plugins import MixedPrecision
from observed_runs import acting
from toy_models import variant

import lightning_spectral as ls

ALGORITHMS: list[Any] = [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, max_epochs=2)


class Autocast(MixedPrecision):
    """Mixed precision that keeps converted weights until the outermost context ends, or does not."""

    def __init__(self, cache: bool) -> None:
        super().__init__("bf16-mixed", "cpu")
        self.cache = cache

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=None if self.cache else False)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
class TestEveryAlgorithm:
    def test_gradient_scaling_alone_changes_no_bit(self, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
        """Neither the clients' steps nor the server's, whose pseudo-gradient was never scaled."""
        plain = fit(seeded(lit_mlp), data, algorithm=algorithm)
        plugin = ScalesAlone()
        scaled = fit(seeded(lit_mlp), data, algorithm=algorithm, trainer={"plugins": [plugin]})
        assert torch.equal(plain.weights, scaled.weights)
        assert scaled.trainer.precision_plugin.scaler is plugin.scaler  # restored after the fit
        assert plugin.scaler.get_scale() == 2.0**8

    def test_every_step_converts_the_weights_of_the_step_before(
        self, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        """Also where the plugin lets autocast keep converted weights, as that of Lightning 2.4 does."""
        runs = [
            fit(seeded(lit_mlp), data, algorithm=algorithm, trainer={"plugins": [plugin]})
            for plugin in (Autocast(cache=True), Autocast(cache=False))
        ]
        assert torch.equal(runs[0].weights, runs[1].weights)

    @pytest.mark.parametrize("device", DEVICES)
    def test_clients_train_in_half_precision_with_scaled_gradients(
        self, device: str, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        seen: set[torch.dtype] = set()

        def forward(self: Any, x: Any) -> Any:
            output = lit_mlp.forward(self, x)
            seen.add(output.dtype)
            return output

        plugin = MixedPrecision("16-mixed", device)  # by name, Lightning gives CPUs bf16-mixed instead
        half = fit(
            seeded(variant(lit_mlp, forward=forward)),
            data,
            algorithm=algorithm,
            trainer={"plugins": [plugin], "accelerator": device},
        )
        assert seen == {torch.float16}
        assert all(p.dtype == torch.float32 for p in half.module.parameters())
        if device == "cpu":  # devices draw differently
            full = fit(seeded(lit_mlp), data, algorithm=algorithm).history
            eps = torch.finfo(torch.float16).eps
            assert half.history.column("fl/loss") == pytest.approx(full.column("fl/loss"), rel=eps)

    def test_losses_are_summed_in_full_precision(self, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
        """bfloat16 has 8 bits: the error of summing a hundred numbers in it would show."""

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            loss = lit_mlp.training_step(self, batch, batch_idx)
            self.log("third", 1 / 3)
            return loss - loss.detach() + 1 / 3

        data.batch_size = 1
        lit = seeded(variant(lit_mlp, training_step=training_step))
        history = fit(lit, data, algorithm=algorithm, trainer={"precision": "bf16-true"}).history
        assert history.column("third") == pytest.approx([1 / 3] * 2, rel=1e-12)
        third = float(torch.tensor(1 / 3, dtype=torch.bfloat16))
        assert history.column("fl/loss") == pytest.approx([third] * 2, rel=1e-12)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
    def test_losses_differ_by_roundings(
        self, precision: Any, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit
    ) -> None:
        history = fit(seeded(lit_mlp), data, algorithm=algorithm, trainer={"precision": precision}).history
        full = fit(seeded(lit_mlp), data, algorithm=algorithm).history
        eps = torch.finfo(torch.float32 if precision == "64-true" else torch.bfloat16).eps
        # a round's loss is a mean over sixty examples, whose roundings differ in sign: at most one remains
        assert history.column("fl/loss") == pytest.approx(full.column("fl/loss"), rel=eps)


@pytest.mark.parametrize("algorithm", [ls.SpectralSharding(), ls.WidthSharding()], ids=["spectral", "width"])
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_an_example_input_is_cast_like_batches(
    precision: Any, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    """Plans are those of the module in single precision, the type of the example."""
    lit = seeded(lit_mlp)
    lit.example_input_array = torch.zeros(2, 6)
    plain = str(algorithm.bind(lit).plan)
    fitted = fit(lit, data, algorithm=algorithm, max_epochs=1, trainer={"precision": precision})
    assert {weight.dtype for weight in fitted.module.parameters()} == {
        torch.bfloat16 if precision == "bf16-true" else torch.float64
    }
    assert str(algorithm.bind(fitted.module).plan) == plain


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_only_forward_passes_have_another_default_type(precision: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    seen: dict[str, set[torch.dtype]] = {"forward": set(), "hook": set(), "callback": set()}
    kind = variant(
        lit_mlp,
        before_step=lambda lit, batch: seen["forward"].add(torch.get_default_dtype()),
        on_before_optimizer_step=lambda self, optimizer: seen["hook"].add(torch.get_default_dtype()),
    )
    spy = acting(on_round_end=lambda *_: seen["callback"].add(torch.get_default_dtype()))
    fit(kind(), data, clients_per_round=2, max_epochs=1, callbacks=[spy], trainer={"precision": precision})
    narrow = {"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    assert seen == {"forward": {narrow}, "hook": {torch.float32}, "callback": {torch.float32}}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["dense", "spectral"])
def test_weights_on_a_device_are_those_of_the_cpu(
    device: str, algorithm: Any, lit_mlp: Any, data: Any, fit: Fit
) -> None:
    there, here = (
        fit(seeded(lit_mlp, dropout=0.0), data, algorithm=algorithm, max_epochs=1, trainer={"accelerator": accelerator})
        for accelerator in (device, "cpu")  # without dropout, since devices draw differently
    )
    assert there.trainer.strategy.root_device.type == device
    # signs and order of equal singular vectors may differ, their products do not: float32, one round of a few steps
    torch.testing.assert_close(there.weights.cpu(), here.weights, rtol=1e-4, atol=1e-5)
