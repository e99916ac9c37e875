"""FIARSE against FedAvg, and against a slow run with masks as the paper writes them."""

import copy
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset
from toy_models import LitMLP, plain_sgd, variant

import lightning_spectral as ls
from lightning_spectral.algorithms.fiarse import ThresholdedWeight

WEIGHTS = ("net.0.weight", "net.2.weight", "net.5.weight")
SIZE = 12 * 6 + 12 * 12 + 3 * 12  # of these weights


def plain() -> LitMLP:
    """Without dropout, momentum or a schedule, and with weights that move far."""
    return variant(LitMLP, configure_optimizers=plain_sgd(1.0))(lr=1.0, dropout=0.0)


class Threshold(torch.autograd.Function):
    """Whether a magnitude is used, with the derivative that the paper gives it."""

    @staticmethod
    def forward(ctx: Any, magnitude: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(magnitude)
        ctx.threshold = threshold
        return (magnitude >= threshold).to(magnitude.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (magnitude,) = ctx.saved_tensors
        slope = 2 * ctx.threshold / (magnitude + ctx.threshold) ** 2
        return grad * slope * (magnitude >= ctx.threshold), None


def trained_slowly(server: nn.Module, client: nn.Module, batches: Any, keep_ratio: float) -> dict[str, Tensor]:
    """The trained weights of one client, as published: a mask in each forward pass; absent entries are NaN."""
    parameters = {name: p.detach().clone() for name, p in server.named_parameters()}
    magnitudes = torch.cat([parameters[name].abs().flatten() for name in WEIGHTS])
    threshold = float(magnitudes.sort(descending=True).values[round(keep_ratio * SIZE) - 1])
    held = {name: parameters[name].abs() >= threshold for name in WEIGHTS}
    for name in WEIGHTS:
        parameters[name] *= held[name]
    for x, y in batches:
        leaves = {name: p.requires_grad_() for name, p in parameters.items()}
        used = {n: p * Threshold.apply(p.abs(), threshold) if n in WEIGHTS else p for n, p in leaves.items()}
        loss = nn.functional.cross_entropy(functional_call(client, used, (x,)), y)
        steps = zip(leaves.items(), torch.autograd.grad(loss, list(leaves.values())), strict=True)
        parameters = {name: (p - client.hparams.lr * g).detach() for (name, p), g in steps}
    return {**parameters, **{name: parameters[name].masked_fill(~held[name], float("nan")) for name in WEIGHTS}}


def test_an_average_is_that_of_those_who_held_an_entry(fit: Fit, toy: TensorDataset) -> None:
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=3), batch_size=1000)
    before, ratios = seeded(plain), [0.25, 0.5, 0.25]
    after = fit(seeded(plain), data, algorithm=ls.FIARSE(ratios), clients_per_round=3, local_epochs=4).module
    clients = []
    for indices, ratio in zip(data.partition, ratios, strict=True):
        batches = [[tensor[indices] for tensor in toy.tensors]] * 4
        clients.append((len(indices), trained_slowly(before, copy.deepcopy(before), batches, ratio)))
    for name, weight in after.named_parameters():
        values = torch.stack([trained[name] for _, trained in clients])
        shares = torch.tensor([float(size) for size, _ in clients]).view(-1, *[1] * (values.dim() - 1))
        shares = shares * ~values.isnan()
        mean = (shares * values.nan_to_num()).sum(0) / shares.sum(0)
        old = before.get_parameter(name).detach()
        torch.testing.assert_close(weight.detach(), torch.where(shares.sum(0) > 0, mean, old), rtol=1e-5, atol=1e-6)
        assert torch.equal(weight[shares.sum(0) == 0], old[shares.sum(0) == 0])


def test_a_client_that_holds_all_weights_trains_as_in_federated_averaging(fit: Fit, data: Any) -> None:
    ours, theirs = (
        fit(seeded(LitMLP), data, algorithm=algorithm, max_epochs=2) for algorithm in (ls.FIARSE(1.0), ls.FedAvg())
    )
    assert same_state(ours.tensors, theirs.tensors)
    assert ours.ledger.bytes_per_client() == theirs.ledger.bytes_per_client()


def test_a_step_that_is_begun_and_not_taken_loses_no_small_weight() -> None:
    weight = nn.Parameter(torch.tensor([[0.5, 2.0, 0.0]]))
    thresholded = ThresholdedWeight(weight, held=torch.tensor([[True, True, False]]), threshold=1.0)
    for _ in range(2):
        thresholded.use()
        assert weight.tolist() == [[0.0, 2.0, 0.0]]
    thresholded.restore()
    assert weight.tolist() == [[0.5, 2.0, 0.0]]


@pytest.mark.parametrize(("exclude", "masked"), [((), SIZE), (("net.5.*",), SIZE - 36)])
def test_bytes_are_the_values_and_a_bit_for_each_weight(exclude: Any, masked: int, fit: Fit, data: Any) -> None:
    ledger = fit(seeded(LitMLP), data, algorithm=ls.FIARSE(0.25, exclude=exclude)).ledger
    whole = 12 + 12 + 3 + SIZE - masked
    bits = masked / 8 + (0.5 if exclude == () else 0.0)  # 36 bits are padded to whole bytes
    assert ledger.bytes_per_client() == {0.25: (4 * (whole + masked / 4) + bits, 4 * (whole + masked / 4))}


def test_a_module_without_weights_to_choose_from_is_refused(fit: Fit, data: Any) -> None:
    with pytest.raises(ValueError, match=r"FIARSE needs trainable weights .*, and LitMLP has none\. Exclude fewer"):
        fit(seeded(LitMLP), data, algorithm=ls.FIARSE(exclude=["*"]))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_the_parts_of_a_weight_norm_stay_whole(norm: Any, lit: Any, data: Any, fit: Any) -> None:
    lit.net[2] = norm(lit.net[2])
    algorithm = ls.FIARSE(keep_ratio=0.3)
    assert algorithm.masked_weights(lit) == ("net.0.weight", "net.5.weight")
    assert fit(lit, data, algorithm=algorithm).weights.isfinite().all()
