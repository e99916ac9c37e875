"""Which filters go together: the one function that decides, its sentences, and the table that it prints."""

import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_models import LitMLP, Renamed

import lightning_spectral as ls
from lightning_spectral.algorithms.filter import conflict
from lightning_spectral.filters import Filter, together

PRIVATE = ls.ClientPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-3)
SHOWN: list[Filter] = [
    ls.Personal(["net.5.*"]),
    ls.Weights("uniform"),
    ls.UsualUpdateNorm(),
    ls.Robust(ls.Median()),
    ls.LocalNoise(clip=1.0, noise_multiplier=1.0),
    ls.TopK(0.1),
    PRIVATE,
    ls.SecureSums(),
]
PAGE = Path(__file__).parents[2] / "docs" / "filters.md"


def build(*filters: Any, **options: Any) -> ls.FederatedModule:
    who: dict[str, Any] = {"clients_per_round": 4}
    if any(isinstance(each, ls.ClientPrivacy) for each in filters):
        who = {"participation": ls.Uniform(active=4)}
    return ls.FederatedModule(LitMLP(), filters=list(filters), **{**who, **options})


def test_the_page_has_the_table_that_the_code_prints() -> None:
    assert together(SHOWN) in PAGE.read_text()


def test_the_page_is_short() -> None:
    assert len(re.findall(r"\S+", PAGE.read_text())) <= 1200


@pytest.mark.parametrize(
    "pair",
    [*itertools.permutations([*SHOWN, ls.FedNova()], 2)],
    ids=lambda pair: "-".join(type(each).__name__ for each in pair),
)
def test_a_pair_is_built_or_refused_by_its_sentence(pair: tuple[Filter, Filter]) -> None:
    said = conflict(*pair)
    if not said:
        build(*pair)
        return
    assert all(type(each).__name__ in said for each in pair)
    assert re.search(r"leave one out|put \w+ before \w+|give one", said)
    with pytest.raises(ValueError, match=re.escape(said)):
        build(*pair)


def test_two_that_pack_and_two_of_a_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TopK packs what Int8 reads: leave one out\."):
        build(ls.TopK(0.1), ls.Int8())
    with pytest.raises(ValueError, match="Give TopK once"):
        build(ls.TopK(0.1), ls.TopK(0.2))
    with pytest.raises(ValueError, match="UsualUpdateNorm and MaxUpdateNorm do the same; give one"):
        build(ls.UsualUpdateNorm(), ls.MaxUpdateNorm(1.0))


@pytest.mark.parametrize(
    ("filters", "algorithm", "said"),
    [
        ([ls.Personal(["net.0.*"])], ls.WidthSharding(), "Personal needs an algorithm whose clients may keep"),
        (
            [ls.Personal(["net.0.*"])],
            ls.Ditto(),
            "clients may keep parameters of their own, which Ditto does not promise: use FedAvg, since Ditto's clients "
            "keep a whole model of their own",
        ),
        (
            [ls.Personal(["net.0.*"], epochs=2)],
            ls.Scaffold(),
            "Scaffold needs every step of a client to train what it sends back; leave out `epochs=2` of Personal",
        ),
        ([ls.TopK(0.1)], ls.SpectralSharding(), "TopK needs an algorithm whose clients send back the same tensors"),
        (
            [ls.MaxUpdateNorm(1.0)],
            ls.Zampling(4),
            "send back new values of the tensors that were sent, which Zampling does not promise",
        ),
        ([PRIVATE], ls.SpectralSharding(), r"hidden by noise on its sums, .*SpectralSharding\(TopN\(\), keep"),
    ],
)
def test_what_an_algorithm_does_not_promise_is_named_with_the_remedy(filters: Any, algorithm: Any, said: str) -> None:
    lit = LitMLP()
    lit.example_input_array = torch.zeros(2, 6)
    who: Any = {"participation": ls.Uniform(active=4)} if filters == [PRIVATE] else {"clients_per_round": 4}
    with pytest.raises(ValueError, match=said):
        ls.FederatedModule(lit, algorithm=algorithm, filters=filters, **who)


def test_a_subclass_promises_nothing_unless_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"or, if they do, let Inherits say so: `promises = Promises\(new_values=True"):
        build(ls.MaxUpdateNorm(1.0), algorithm=type("Inherits", (ls.FedAvg,), {})())  # it may upload anything
    build(ls.MaxUpdateNorm(1.0), algorithm=Renamed())


def test_zampling_has_a_compression_of_its_own() -> None:
    assert ls.Zampling(compression=8).compression == 8


@pytest.mark.parametrize("each", SHOWN, ids=lambda f: type(f).__name__)
def test_filters_are_choices(each: Filter) -> None:
    assert pickle.loads(pickle.dumps(each)) == each
    assert repr(each).startswith(type(each).__name__)


def test_costs_need_not_know_who_takes_part() -> None:
    """A private federation is checked for its samplers where they are known."""
    plain = ls.cost_table(LitMLP(), ls.FedAvg(), [1.0], torch.zeros(1, 6))
    assert ls.cost_table(LitMLP(), ls.FedAvg(), [1.0], torch.zeros(1, 6), filters=[PRIVATE]).at == plain.at
