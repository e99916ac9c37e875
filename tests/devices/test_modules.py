"""What is asked of a module outside a fit, while the module is on the device."""

import copy
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from torch import Tensor, nn
from toy_models import LitSmall

import lightning_spectral as ls
from lightning_spectral.functional import spectra
from lightning_spectral.functional.zampling import InfluenceMatrix, LayerRows
from lightning_spectral.nn.layers.terms import SingularTerms
from lightning_spectral.nn.optimizer_hooks import TermRates, decaying
from lightning_spectral.nn.trace import as_input

EXAMPLE = torch.zeros(2, 6)


@pytest.fixture
def lit(device: Any) -> LitSmall:
    return seeded(LitSmall).to(device.torch)


def on_cpu() -> LitSmall:
    return seeded(LitSmall)


REPORTS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "validate": lambda net, x: ls.validate(net, x),
    "cost_table": lambda net, x: ls.cost_table(net, ls.SpectralSharding(), [0.5, 1.0], x),
    "largest_that_fits": lambda net, x: ls.largest_that_fits(net, ls.SpectralSharding(), x, budget_macs=300),
    "width_plan": lambda net, x: ls.nn.width_plan(net, x),
    "cost_table by width": lambda net, x: ls.cost_table(net, ls.WidthSharding(), [0.5, 1.0], x),
    "cost_table of LoRA": lambda net, x: ls.cost_table(net, ls.LoRA(), [1, 2], x),
    "cost_table of Zampling": lambda net, x: ls.cost_table(net, ls.Zampling(degree=2), [2, 8], x),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("example", [EXAMPLE, None], ids=["given", "its own"])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_that_of_the_cpu(name: str, example: Tensor | None, lit: LitSmall) -> None:
    assert str(REPORTS[name](lit, example)) == str(REPORTS[name](on_cpu(), example))


class Batch(UserDict[str, Tensor]):
    """What a tokenizer returns."""

    def to(self, device: Any) -> "Batch":
        self.data = {name: tensor.to(device) for name, tensor in self.data.items()}
        return self


def test_examples_of_every_kind_are_moved(lit: LitSmall, device: Any) -> None:
    batch = Batch({"x": EXAMPLE})
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 6), torch.zeros(1, 6)])
    x, named, rows, own, text = as_input(lit.double(), (EXAMPLE, {"y": torch.ones(1)}, packed, batch, "text"))
    assert text == "text"
    assert isinstance(own, Batch)
    assert (own["x"].device, batch["x"].device) == (device.torch, EXAMPLE.device)
    assert {tensor.device for tensor in (x, named["y"], rows.data)} == {device.torch}
    assert {tensor.dtype for tensor in (x, named["y"], rows.data)} == {torch.float64}


def test_replaced_layers_stay_on_the_device(lit: LitSmall, device: Any) -> None:
    here, there = ls.replace_layers(on_cpu(), 0.5), ls.replace_layers(lit, 0.5)
    assert {tensor.device for tensor in there.state_dict().values()} == {device.torch}
    for layer in (*here.modules(), *there.modules()):
        if isinstance(layer, SingularTerms):
            turn_upwards(layer)
    assert_same(there, here)
    assert_same_outputs(there, here, device)


@pytest.mark.parametrize("few", [0, spectra.FEW])
@pytest.mark.parametrize("multipliers", [[1.0, 1.0, 1.0], [1.0, 2.0, 40.0]], ids=["ones", "others"])
def test_gradients_are_decayed_and_scaled_as_on_the_cpu(
    multipliers: list[float], few: int, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the Gram matrices, or through the weight itself, where that starts fewer kernels."""
    monkeypatch.setattr(spectra, "FEW", few)
    changed = []
    for where in ("cpu", device.torch):
        draw = torch.Generator().manual_seed(0)
        layer = ls.nn.SpectralShardedLinear(6, 8, num_terms=3, bias=False)
        layer.load_terms(
            torch.randn(8, 3, generator=draw), torch.randn(3, 6, generator=draw), torch.tensor(multipliers)
        )
        optimizer = torch.optim.SGD(layer.to(where).parameters(), lr=0.1)
        rates = TermRates([layer], 10.0, 1.0)
        rates.start_client()
        layer.u.grad, layer.v.grad = torch.ones_like(layer.u), torch.ones_like(layer.v)
        decaying({"": 0.5}, False, optimizer, {"": layer})()
        rates.acting(optimizer)()
        assert layer.multiplies == (multipliers[-1] != 1.0)
        changed.append((layer.u.grad.cpu(), layer.v.grad.cpu()))
    torch.testing.assert_close(changed[1], changed[0])
    assert min((gradient - 1).abs().min() for gradient in changed[0]) > 1e-3


def test_a_spectral_start_is_that_of_the_cpu(lit: LitSmall) -> None:
    here = on_cpu()
    assert str(ls.algorithms.spectral_start(lit, 0.5)) == str(ls.algorithms.spectral_start(here, 0.5))
    assert_same(lit, here)


def test_zampled_weights_stay_on_the_device_and_are_the_cpus(lit: LitSmall, device: Any) -> None:
    here, there = (ls.nn.zample(net, compression=2, degree=3) for net in (on_cpu(), lit))
    assert_same_outputs(there, here, device)
    there(EXAMPLE.to(device.torch)).sum().backward()
    assert there._zampling.scores.grad.device == device.torch
    plain = ls.nn.unzample(there)
    assert {parameter.device for parameter in plain.parameters()} == {device.torch}
    assert_same(plain, ls.nn.unzample(here))


def test_q_is_multiplied_in_double_precision_where_scores_are(device: Any) -> None:
    matrix = InfluenceMatrix((LayerRows(seed=1, num_rows=40, scale=0.5),), num_columns=20, degree=3)
    for product, size in ((matrix.expand, 20), (matrix.pull_back, 40)):
        x = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(product(x.to(device.torch)).cpu(), product(x), rtol=1e-12, atol=1e-12)


def test_zampled_weights_move_there_and_back(device: Any) -> None:
    net = ls.nn.zample(on_cpu(), compression=2, degree=3)
    before = copy.deepcopy(net.state_dict())
    outputs = net.eval()(EXAMPLE + 1)
    assert_same_outputs(net.to(device.torch), copy.deepcopy(net).cpu(), device)
    assert same_state(net.cpu().state_dict(), before)
    torch.testing.assert_close(net(EXAMPLE + 1), outputs)


def test_a_narrow_model_is_that_of_the_cpu(data: Any, there: Fit, device: Any) -> None:
    algorithm = ls.WidthSharding(keep_ratio=0.8, step_widths=(0.4, 0.8), averages_per_width=True)
    model = there(seeded(LitSmall), data, algorithm=algorithm).model
    here = ls.algorithms.narrow_model(model, 0.4)
    small = ls.algorithms.narrow_model(model.to(device.torch), 0.4)
    assert {tensor.device for tensor in small.state_dict().values()} == {device.torch}
    assert_same(small, here)


def test_a_peft_adapter_is_that_of_the_cpu(data: Any, there: Fit, device: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = there(seeded(LitSmall), data, algorithm=ls.LoRA(2, layers=["net.*"], train=["net.1.*"])).model
    for name in ("here", "there"):
        ls.algorithms.save_peft_adapter(
            model.to("cpu" if name == "here" else device.torch), tmp_path / name, submodule="net"
        )
    one, two = (safetensors.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("here", "there"))
    assert same_state(one, two)


def turn_upwards(layer: SingularTerms) -> None:
    """Make the largest entry of every left singular vector positive: each device chooses the signs of pairs itself."""
    with torch.no_grad():
        signs = layer.u.gather(0, layer.u.abs().argmax(0, keepdim=True)).sign()
        layer.u *= signs
        layer.v *= signs.T


def assert_same(there: nn.Module, here: nn.Module) -> None:
    moved = {name: tensor.cpu() for name, tensor in there.state_dict().items()}
    torch.testing.assert_close(moved, dict(here.state_dict()), rtol=1e-5, atol=1e-6)


def assert_same_outputs(there: nn.Module, here: nn.Module, device: Any) -> None:
    x = torch.arange(12.0).view(2, 6)
    torch.testing.assert_close(there.eval()(x.to(device.torch)).cpu(), here.eval()(x), rtol=1e-4, atol=1e-5)
