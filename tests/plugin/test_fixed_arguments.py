"""Arguments of a federation and its data cannot be changed where the new value would be ignored."""

import inspect
from typing import Any

import pytest
from federation import Fit
from linear_models import two_lines

import lightning_spectral as ls


@pytest.mark.parametrize("name", list(inspect.signature(ls.FederatedModule).parameters))
def test_an_argument_of_a_federation_is_fixed(name: str, lit: Any) -> None:
    model = ls.FederatedModule(lit, clients_per_round=4)
    with pytest.raises(
        AttributeError, match=rf"`{name}` cannot be changed.*: FederatedModule\(\.\.\., {name}=\.\.\.\)"
    ):
        setattr(model, name, 2)


@pytest.mark.parametrize("name", list(inspect.signature(ls.MultiModelModule).parameters))
def test_an_argument_of_a_federation_of_several_models_is_fixed(name: str) -> None:
    model, _ = two_lines(ls.Uniform(active=3))
    with pytest.raises(AttributeError, match=rf"`{name}` cannot be changed in a MultiModelModule"):
        setattr(model, name, 2)


@pytest.mark.parametrize("name", ["train", "collate_fn", "num_workers"])
def test_what_batches_are_made_of_is_fixed(name: str, data: Any) -> None:
    with pytest.raises(AttributeError, match=rf"`{name}` cannot be changed in a FederatedDataModule"):
        setattr(data, name, 2)


@pytest.mark.parametrize("name", ["partitioner", "seed", "client_val_fraction", "labels"])
def test_what_decides_the_partition_is_fixed_once_it_is_drawn(name: str, data: Any) -> None:
    data.seed = 5
    assert data.partition.num_clients == 12
    with pytest.raises(AttributeError, match=rf"`{name}` cannot be changed in a FederatedDataModule"):
        setattr(data, name, 2)


def test_attributes_of_a_subclass_and_sizes_of_batches_can_be_changed(lit: Any, data: Any, fit: Fit) -> None:
    class Own(ls.FederatedModule):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.notes = 1

    model = Own(lit, clients_per_round=4)
    model.notes, data.batch_size, data.drop_last = 2, 5, True
    assert fit(model, data).history.rows
