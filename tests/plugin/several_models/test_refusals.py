"""What several models cannot do is refused by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
from linear_models import SIZES, LitLine, lines, two, two_lines

import lightning_spectral as ls


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ({}, {}, "`models` is empty"),
        ({"a": LitLine()}, {}, "FederatedModule"),
        (two(clients_per_round=3), {}, "of its own"),
        ({"a.b": two()["words"]}, {}, "identifier"),
        ({"keys": two()["words"]}, {}, "named 'keys'"),
        ({"training": two()["words"]}, {}, "another name"),
        (two(), {"participation": 3}, "participation"),
        (two(), {"processors": 0}, "at least 1"),
        (two(), {"processors": {2: 0.5}}, "1"),
        (two(), {"unavailable": {0: ["c"]}}, "unavailable"),
        (two(), {"unavailable": [0]}, "unavailable"),
        (two(), {"unavailable": {-1: ["a"]}}, "least 0"),
        (two(), {"unavailable": {"1": ["words"]}}, "whole"),
        (two(), {"unavailable": {0: "words"}}, "lists"),
        (two(), {"seed": 1.5}, r"`seed` must be a whole number, got 1\.5"),
    ],
)
def test_bad_arguments_are_named(models: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ls.MultiModelModule(models, **{"participation": ls.Uniform(active=1), **options})


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no data": (lambda run: ls.MultiModelDataModule({}), ValueError, "is empty"),
    "data of another type": (lambda run: ls.MultiModelDataModule({"a": 3}), TypeError, "FederatedDataModule"),
    "two arguments for who takes part": (
        lambda run: ls.FederatedModule(LitLine(), clients_per_round=2, participation=ls.Uniform(active=1)),
        ValueError,
        "both say",
    ),
    "data of one model": (
        lambda run: run(ls.MultiModelModule(two(), participation=ls.Uniform(active=1)), lines(3, (4, 5))),
        TypeError,
        "MultiModelModule needs clients",
    ),
    "a cohort that a sampler drew, cut": (
        lambda run: run(*two_lines(ls.Uniform(active=3)), limit_train_batches=2),
        ValueError,
        "lower its `active` instead",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_cannot_work_is_refused(wrong: str, run: Any) -> None:
    call, error, message = REFUSED[wrong]
    with pytest.raises(error, match=message):
        call(run)


@pytest.mark.parametrize("part", ["module", "layer"])
def test_models_cannot_share_weights(part: str) -> None:
    modules = {"words": LitLine(), "images": LitLine()}
    modules["images"].net = modules["words"].net
    if part == "module":
        modules["images"] = modules["words"]
    shared = {name: ls.FederatedModule(module) for name, module in modules.items()}
    with pytest.raises(ValueError, match="'words' and 'images' share weights"):
        ls.MultiModelModule(shared, participation=ls.Uniform(active=1))


def test_predicting_asks_for_one_model(quiet: dict[str, Any]) -> None:
    model, data = two_lines(ls.Uniform(active=3))
    with pytest.raises(NotImplementedError, match=r"predict\(model.models\['words'\], loader\)"):
        pl.Trainer(**quiet).predict(model, data)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"participation": ls.Uniform(active=9)}, SIZES, "`active` must be at most 5"),
        ({"processors": [1, 2]}, SIZES, "lists 2 values for 5 clients"),
        ({}, {"words": (4, 1), "images": (1, 2, 3)}, "different numbers of clients"),
        ({}, {"words": (4, 1), "pictures": (1, 2)}, "under its own name"),
        ({"unavailable": {0: ["words"], 1: ["words"]}}, {"words": (4, 1), "images": (1, 2)}, "no client can train"),
        ({"participation": ls.StaleUpdateVarianceReduced(active=1)}, SIZES, "StaleUpdates"),
        ({"unavailable": {5: ["words"]}}, SIZES, r"clients \[5\]"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_round(
    options: dict[str, Any], sizes: Mapping[str, Sequence[int]], message: str, run: Any
) -> None:
    model = ls.MultiModelModule(two(), **{"participation": ls.Uniform(active=1), **options})
    data = ls.MultiModelDataModule({name: lines(3, of) for name, of in sizes.items()})
    with pytest.raises(ValueError, match=message):
        run(model, data)


def test_batch_hooks_of_all_models_together_are_refused(run: Any) -> None:
    class Whole(ls.MultiModelDataModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    model, data = two_lines(ls.Uniform(active=3))
    with pytest.raises(ValueError, match=r"`Whole.on_after_batch_transfer` would not be told which model.*of each"):
        run(model, Whole(data.modules))
