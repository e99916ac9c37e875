"""The commands of Zampling's study: plans, report and coder; the runs themselves need MNIST, which is not committed."""

import io
import json
import math
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from study_files import study_files

import lightning_spectral as ls

pytest.importorskip("matplotlib", reason="the report draws")
MODULES = ("digits", "tables", "federated", "report", "coding")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The study's files as modules, in a folder of their own."""
    with study_files("zampling", MODULES, tmp_path_factory.mktemp("zampling")) as files:
        yield files


def test_every_run_has_a_file_of_its_own_and_an_algorithm(study: Any) -> None:
    specs = {spec for plan in study.federated.PLANS.values() for spec in plan()}
    assert len({spec.path for spec in specs}) == len(specs)
    for spec in specs:
        if spec.compression:
            ls.Zampling(spec.compression, **study.federated.SETUPS[spec.setup])


def test_the_report_has_a_row_for_each_compression_and_each_other_run(study: Any) -> None:
    spec = study.federated.Spec
    study.federated.OUTPUT.mkdir(parents=True)
    for one in (spec("published", 32), spec("published", 32, seed=1), spec("He start", 8)):
        outcome = {"accuracy": [0.5, 0.9], "sampled": [0.8, 0.9], "down": 4 * 8332, "up": 1042}
        one.path.write_text(json.dumps({**asdict(one), **outcome}))
    study.report.main()
    text = Path("docs/zampling_tables.md").read_text()
    assert "| 32 | 40 | 2 | 1023.5 | 32.0 | 90.00 ± 0.00 | 85.00 ± 0.00 | 0.93 |" in text
    assert "| He start | 8 | 40 | 0.1 |" in text
    assert Path("docs/zampling.png").exists()


@pytest.mark.parametrize("seed", range(3))
def test_coded_bits_come_back_and_take_little_more_than_their_entropy(study: Any, seed: int) -> None:
    draw = random.Random(seed)
    half = study.coding.HALF
    ones = [draw.choice([1, 40, half // 2, half - 40, half - 1]) for _ in range(4000)]
    bits = [int(draw.random() < one / half) for one in ones]
    coded = study.coding.encode(bits, ones)
    assert study.coding.decode(coded, ones) == bits
    entropy = -sum(math.log2(one / half if bit else 1 - one / half) for bit, one in zip(bits, ones, strict=True))
    # the interval is at least 2^24 wide, so a bit loses at most 2^-11 of its probability; and four bytes at the end
    assert 8 * len(coded) <= entropy + len(bits) * 2**-10 + 40


def test_a_coder_that_thinks_otherwise_gets_something_else(study: Any) -> None:
    half = study.coding.HALF
    bits = [0, 1] * 100
    coded = study.coding.encode(bits, [half // 3] * 200)
    assert study.coding.decode(coded, [half // 2] * 200) != bits


def test_a_pickle_that_could_run_code_is_not_read(study: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"\.system has no place in a file of arrays"):
        study.digits.ArraysOnly(io.BytesIO(pickle.dumps(os.system))).load()
