"""Clients whose values fit an exact sum, but whose derived values are too large for it, are left out."""

import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from torch.utils.data import TensorDataset
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.sums.exact_mean import LARGEST

BAD, NUM_CLIENTS, PER_CLIENT = 3, 6, 4
LORA = {"layers": ["net.*"], "rank": 2, "alpha": 2.0, "train": ["net.5.bias"]}
PRODUCTS = [
    ls.SpectralSharding(ls.Collective(), keep_ratio=0.5, aggregation=ls.algorithms.MatrixMeans()),
    ls.LoRA(**LORA, aggregation=ls.StackedProducts()),
]


class LitFar(LitMLP):
    """Ends up far away at a client whose labels are all 2."""

    def __init__(self, far: float = 1e8) -> None:
        super().__init__(dropout=0.0)
        self.far = far

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if bool((batch[1] == 2).all()):
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(self.far)


@pytest.fixture
def few() -> ls.FederatedDataModule:
    x = torch.randn(NUM_CLIENTS * PER_CLIENT, 6, generator=torch.Generator().manual_seed(0))
    clients = torch.arange(NUM_CLIENTS).repeat_interleave(PER_CLIENT)
    labels = torch.where(clients == BAD, 2, torch.arange(len(x)) % 2)
    return ls.FederatedDataModule(TensorDataset(x, labels), ls.NaturalPartitioner(clients.tolist()), batch_size=2)


@pytest.mark.parametrize("algorithm", PRODUCTS, ids=repr)
def test_a_client_whose_products_are_too_large_is_left_out_without_a_trace(algorithm: Any, few: Any, fit: Fit) -> None:
    """The oracle is a client that drops out: the others' average is the same, also of what is trained whole."""
    drops = ls.ClientDropout([float(client == BAD) for client in range(NUM_CLIENTS)])
    options = {"algorithm": algorithm, "clients_per_round": NUM_CLIENTS, "max_epochs": 2}
    dropped = fit(seeded(LitFar), few, dropout=drops, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ls.SpectralWarning)
        fitted = fit(seeded(LitFar), few, **options)
    told = rf"Round [01]: client {BAD} is left out .* \(its contribution to the sums holds values up to [36]e\+16\)"
    assert len(said) == 2
    assert all(re.match(told, str(warning.message)) for warning in said)
    assert same_state(fitted.state, dropped.state)
    assert [row["fl/left_out_not_finite"] for row in fitted.rows] == [1.0, 1.0]
    assert fitted.rows[0]["fl/clients"] == NUM_CLIENTS - 1


class LitFarInSmallSteps(LitFar):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "far", "largest"),
    [
        (ls.Scaffold(), 1e10, r"5e\+12"),  # divided by two steps and the learning rate
        (ls.StaleUpdates(), 6e11, r"1e\+12"),  # the difference of two of them
        (ls.StaleUpdates(num_terms=1), 6e11, r"1e\+12"),
    ],
    ids=repr,
)
def test_so_is_one_whose_control_or_stale_update_is_too_large(
    algorithm: Any, far: float, largest: str, few: Any, fit: Fit
) -> None:
    drops = ls.ClientDropout([float(client == BAD) for client in range(NUM_CLIENTS)])
    options = {"algorithm": algorithm, "clients_per_round": NUM_CLIENTS, "max_epochs": 3}
    dropped = fit(seeded(LitFarInSmallSteps, far), few, dropout=drops, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ls.SpectralWarning)
        fitted = fit(seeded(LitFarInSmallSteps, far), few, **options)
    told = rf"Round [012]: client {BAD} is left out .* \(its contribution to the sums holds values up to {largest}\)"
    assert len(said) == 3
    assert all(re.match(told, str(warning.message)) for warning in said)
    assert same_state(fitted.tensors, dropped.tensors)


@pytest.mark.parametrize("algorithm", PRODUCTS, ids=repr)
def test_a_round_ends_where_faults_end_it(algorithm: Any, few: Any, fit: Fit) -> None:
    faults = ls.server.Faults(on_not_finite=ls.server.Raise())
    with pytest.raises(ls.ClientError, match=rf"Round 0, client {BAD}: .* \(its contribution to the sums holds"):
        fit(seeded(LitFar), few, algorithm=algorithm, clients_per_round=NUM_CLIENTS, faults=faults)


@pytest.mark.parametrize(
    "algorithm",
    [
        ls.SpectralSharding(keep_ratio=0.5, aggregation=ls.algorithms.TermMeans()),
        ls.LoRA(**LORA, aggregation=ls.TruncatedProducts()),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:Round 0. the clients' mean update:lightning_spectral.SpectralWarning")
def test_aggregations_that_sum_factors_average_the_same_client(algorithm: Any, few: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitFar), few, algorithm=algorithm, clients_per_round=NUM_CLIENTS)
    assert fitted.rows[0]["fl/clients"] == NUM_CLIENTS


@pytest.mark.filterwarnings("ignore:Round 0. the clients' mean update:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_products_are_multiplied_out_where_the_bound_is_not_sure(factor: float, few: Any, fit: Fit) -> None:
    """Twice the bound exceeds the limit in both cases, the product itself only in the second."""
    far = (factor * LARGEST / 12) ** 0.5  # twelve inputs or outputs, all terms: products are sums of twelve
    algorithm = ls.SpectralSharding.published(ls.TopN(), keep_ratio=1.0, aggregation=ls.algorithms.MatrixMeans())
    options = {"algorithm": algorithm, "clients_per_round": NUM_CLIENTS}
    told = pytest.warns(ls.SpectralWarning, match="its contribution to the sums") if factor > 1 else nullcontext()
    with told:
        fitted = fit(seeded(LitFar, far), few, **options)
    assert fitted.rows[0]["fl/clients"] == NUM_CLIENTS - (factor > 1)
