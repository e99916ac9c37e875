"""Two and three processes against one: the same bits, and errors in all of them. Processes talk over the loopback."""

import os
import platform
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import client_parallel_runs as RUNS
import lightning.pytorch as pl
import pytest
import torch
from federation import seeded
from forks import finished
from lightning.pytorch.strategies import StrategyRegistry
from lightning_versions import HAS_2_5_3
from ports import free_port

import lightning_spectral as ls
from lightning_spectral.functional.spectra import singular_terms
from lightning_spectral.plugin import ClientParallelStrategy
from lightning_spectral.plugin.callbacks import LedgerRow
from lightning_spectral.report.runs import NAME, read_record

SECONDS = 300  # for all runs; within them no process waits for another longer than a minute
SAME = [name for name in RUNS.RUNS if "fails" not in name]
CASES = [
    pytest.param(name, n, marks=() if n == 2 and name in RUNS.QUICK else pytest.mark.slow)
    for name in SAME
    for n in (2, 3)
    if n == 2 or name not in RUNS.ONLY_WITH_TWO
]
TWO_AND_THREE = [2, pytest.param(3, marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Results:
    """The final state of each process of each run; several processes do a group of runs when one is looked at."""

    folder: Path
    alone: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: set[tuple[int, str]] = field(default_factory=set)

    def __call__(self, name: str, num_processes: int) -> list[dict[str, Any]]:
        if num_processes > 1:
            return [self.of(name, num_processes, rank) for rank in range(num_processes)]
        if name not in self.alone:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*num_workers")
                warnings.simplefilter("ignore", ls.SpectralWarning)
                self.alone[name] = RUNS.run(self.folder / "1" / name, **RUNS.RUNS[name])
        return [self.alone[name]]

    def of(self, name: str, num_processes: int, rank: int) -> dict[str, Any]:
        self.run(name, num_processes)
        found: dict[str, Any] = torch.load(self.folder / f"{name} {num_processes} {rank}.pt", weights_only=True)
        return found

    def run(self, name: str, num_processes: int) -> None:
        group = RUNS.group_of(name) if name in RUNS.RUNS else "quick"
        if num_processes > 1 and (num_processes, group) not in self.done:
            for quick in RUNS.QUICK:  # one has the checkpoint that is resumed; forks keep what these have cached
                self(quick, 1)
            self.done.add((num_processes, group))
            said = self.folder / "said"
            assert finished(said, SECONDS, RUNS.main, self.folder, num_processes, free_port(), group) == 0, (
                said.read_text()[-3000:]
            )
        elif num_processes == 1:
            self(name, 1)

    def checkpoint(self, name: str, num_processes: int) -> Path:
        self.run(name, num_processes)
        return self.folder / str(num_processes) / name / "0.ckpt"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("runs"))


def assert_same_run(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Bit for bit; NaN equals NaN."""
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in ours["weights"].items():
        assert torch.equal(value, theirs["weights"][name]), name
    for key in ("history", "ledger", "metrics", "global_step", "error", "tested", "unreached"):
        assert repr(ours[key]) == repr(theirs[key]), key


@pytest.mark.parametrize(("name", "num_processes"), CASES)
def test_every_process_ends_as_a_single_one(name: str, num_processes: int, results: Results) -> None:
    (alone,) = results(name, 1)
    assert alone["error"] is None
    assert alone["global_step"] == RUNS.RUNS[name].get("rounds", 2)
    for one in results(name, num_processes):
        assert_same_run(one, alone)


@pytest.mark.slow
def test_runs_are_what_they_are_called(results: Results) -> None:
    """Otherwise equality would prove little: clients are left out, cohorts are cut, watchers log their values."""
    named = ("clients left out", "cut cohort", "coordinated, one client", "evaluation on clients")
    rows = {name: results(name, 1)[0]["history"][0] for name in named}
    assert rows["clients left out"]["fl/clients_left_out"] > 0
    assert rows["cut cohort"]["fl/clients"] == 4
    remembered = [row["fl/store_bytes"] for row in results("a store of clients", 1)[0]["history"]]
    assert remembered == [16 * 9, 16 * 12, 16 * 12]  # nine of twelve clients a round: at least six come again
    rounds = results("errors, dropout and over-selection", 1)[0]["history"]
    for reason in ("error", "dropped_out", "surplus"):
        assert sum(row[f"fl/left_out_{reason}"] for row in rounds) > 0, reason
    for name in ("errors, dropout and over-selection", "several models"):
        frozen = [LedgerRow(*row).frozen_bytes for row in results(name, 1)[0]["ledger"]]
        assert {0, 4 * (6 * 12 + 12)} == set(frozen), name
    assert rows["coordinated, one client"]["fl/clients"] == 1
    assert {"fl/discrepancy", "fl/fedavg_alignment"} <= results("spectral", 1)[0]["metrics"].keys()
    assert "fl/clients/val_acc/mean" in rows["evaluation on clients"]
    assert len(results("dense", 1)[0]["ledger"]) == 14
    assert results("experts", 1)[0]["unreached"] == [{"unreached": ["experts.2"]}]
    assert results("dense", 1)[0]["tested"][0]["test_loss"] > 0


def test_one_process_writes_the_dashboard_of_all(results: Results) -> None:
    def record(num_processes: int, rank: int) -> Path:
        results.run("several models", num_processes)
        return results.folder / str(num_processes) / f"several models, process {rank}" / NAME

    def histograms(num_processes: int) -> list[Any]:
        return [line["histograms"] for line in read_record(record(num_processes, 0)).lines if "histograms" in line]

    assert len(histograms(1)) == 2
    assert histograms(2) == histograms(1)
    assert not record(2, 1).exists()


def test_two_processes_start_from_the_weights_that_the_plain_function_makes(results: Results) -> None:
    module = seeded(RUNS.LitMLP)
    unstarted = module.net[2].weight.detach().clone()
    changed = ls.algorithms.spectral_start(module, keep_ratio=0.3, layers=RUNS.EVERY_LAYER).changed
    assert changed == ["net.0", "net.2", "net.5"]
    assert not torch.equal(module.net[2].weight, unstarted)
    for num_processes in (1, 2):
        for one in results("the start alone", num_processes):
            assert all(torch.equal(value, one["weights"][name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_a_run_resumes_with_another_number_of_processes(num_processes: int, results: Results) -> None:
    (whole,) = results(RUNS.RESUMED, 1)
    for one in results("resumed", num_processes):
        assert_same_run(one, whole)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_a_checkpoint_of_several_processes_resumes_in_one(num_processes: int, results: Results, tmp_path: Path) -> None:
    ckpt = results.checkpoint(RUNS.RESUMED, num_processes)
    assert_same_run(RUNS.run(tmp_path, ckpt=ckpt, **RUNS.RUNS[RUNS.RESUMED]), *results(RUNS.RESUMED, 1))


@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_a_failing_client_ends_every_process_with_its_address(num_processes: int, results: Results) -> None:
    words = "ClientError: Round 1, client 0, local training: FloatingPointError: example 0"
    (alone,) = results("a client fails", 1)
    assert alone["error"] == words
    several = results("a client fails", num_processes)
    assert len({one["error"] for one in several}) == 1
    assert several[0]["error"].startswith(f"{words} (process ")
    for one in several:  # the round before is complete
        assert_same_run({**one, "error": None}, {**alone, "error": None})


@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_a_failing_callback_names_the_client_too(num_processes: int, results: Results) -> None:
    for one in results("a callback fails", num_processes):
        assert one["error"].startswith("ClientError: Round 0, client ")
        assert one["error"].endswith(f"KeyError: 'mine' (process {num_processes - 1})")


@pytest.mark.parametrize("num_processes", [1, *TWO_AND_THREE])
@pytest.mark.parametrize("algorithm", ["dense", "spectral"])
def test_broken_server_weights_end_every_process_alike(algorithm: str, num_processes: int, results: Results) -> None:
    """The weights are the same everywhere, so the error is too, whichever process saw a client fail."""
    for one in results(f"the server's step fails, {algorithm}", num_processes):
        assert one["error"].startswith(
            "RoundError: Round 1: the server's weights were not finite before it began: 'net.0"
        )
        assert "process" not in one["error"]


def test_an_update_that_cannot_be_summed_ends_every_process_alike(results: Results) -> None:
    errors = {re.sub(r" \(process [01]\)$", "", one["error"]) for n in (1, 2) for one in results("a sum fails", n)}
    assert len(errors) == 1
    assert errors.pop().startswith("RoundError: Round 0, client 2, which AttackEnd has let pass: ")


@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_an_error_outside_of_turns_leaves_nobody_waiting(num_processes: int, results: Results) -> None:
    *others, last = results("hung up", num_processes)
    assert last["error"] == "KeyError: 'mine alone'"
    assert all(one["error"] is not None for one in others)


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [*((name, 2) for name in RUNS.LOST), *(pytest.param(name, 3, marks=pytest.mark.slow) for name in [*RUNS.LOST][:2])],
)
def test_a_lost_process_is_named_with_its_client(name: str, num_processes: int, results: Results) -> None:
    lost = RUNS.LOST[name][0] % num_processes
    for rank in sorted({*range(num_processes)} - {lost}):
        one = results.of(name, num_processes, rank)
        or_another = "(, client \\d+)*( or client \\d+)?" if lost == 0 else ""  # who it was, its store knew
        named = rf"LostProcessError: .*\b{lost} \(round 1, client \d+{or_another}\)"
        assert re.match(named, one["error"]), one["error"]
        assert "latest_checkpoint" in one["error"]
        assert one["global_step"] == 1
    if lost != 0 and HAS_2_5_3:  # the first process saves
        saved = results.folder / name / str(num_processes) / "saved.ckpt"
        assert torch.load(saved, weights_only=True)["global_step"] == 1


@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_processes_of_different_runs_are_refused(num_processes: int, results: Results) -> None:
    for one in results("other seeds", num_processes):
        assert one["error"].startswith("ValueError: The processes are set up for different runs")
        assert "seed: 0 in process 0, 1 in process 1" in one["error"]


@pytest.mark.parametrize("num_processes", TWO_AND_THREE)
def test_work_is_shared_out_and_its_failures_are_everywhere(num_processes: int, results: Results) -> None:
    for said in results("said", num_processes):
        assert said["gathered"] == list(range(num_processes))
        assert said["not gathered"] == f"client 7 (process {num_processes - 1})"
        for n, terms in zip((7, 2, 5, 4, 9), said["terms"], strict=True):
            slow = singular_terms(torch.randn(n, n + 3, generator=torch.Generator().manual_seed(n)))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(terms, slow, strict=True))
        assert said["error"] == "RoundError: ArithmeticError: too large (process 0)"
        assert [float(total) for total in said["sums"]] == [
            num_processes * (num_processes + 1) / 2,
            num_processes / 2,
            num_processes,
        ]


def test_only_federated_modules_are_trained(lit: Any, quiet: Any) -> None:
    strategy = ls.plugin.ClientParallelStrategy()
    trainer = pl.Trainer(max_epochs=1, strategy=strategy, devices=1, **quiet)
    strategy.connect(lit)
    trainer.state.fn = "fit"  # type: ignore[assignment]
    with pytest.raises(TypeError, match="spreads clients, but LitMLP trains on batches; wrap it"):
        strategy.setup(trainer)


def test_batch_norm_over_processes_is_refused(lit: Any, quiet: Any) -> None:
    trainer = pl.Trainer(max_epochs=1, strategy="client_parallel", devices=1, sync_batchnorm=True, **quiet)
    trainer.strategy.connect(ls.FederatedModule(lit, clients_per_round=1))
    with pytest.raises(ValueError, match="sync_batchnorm=True would mix the batches of different clients"):
        trainer.strategy.setup(trainer)


def test_the_strategy_goes_by_name() -> None:
    ours = {name for name in StrategyRegistry if name.startswith("client_parallel")}
    assert ours == {"client_parallel", "client_parallel_fork", "client_parallel_notebook", "client_parallel_spawn"}


class Met(Exception):
    """The process would wait for the others."""


@contextmanager
def waiting() -> Any:
    raise Met
    yield


@pytest.fixture
def strategy() -> ClientParallelStrategy:
    """That of one of several processes whose Trainer is handling an error."""
    strategy = ClientParallelStrategy()
    strategy._meetings = SimpleNamespace(is_broken=False, meeting=waiting)  # type: ignore[assignment]
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(interrupted=True))  # type: ignore[assignment]
    return strategy


@pytest.mark.parametrize(
    "error", [KeyError("mine"), KeyboardInterrupt(), ls.errors.LostProcessError("another is gone")]
)
def test_nobody_waits_after_an_error_of_one(error: BaseException, strategy: ClientParallelStrategy) -> None:
    try:
        raise error
    except BaseException:
        strategy.barrier("Trainer.save_checkpoint")
        assert strategy.broadcast("mine") == "mine"


def test_processes_with_the_same_error_wait_for_the_checkpoint(strategy: ClientParallelStrategy) -> None:
    """Otherwise a launcher might end process 0 while it writes."""
    try:
        raise ls.ClientError("Round 3, client 7, local training: KeyError")
    except ls.ClientError:
        with pytest.raises(Met):
            strategy.barrier("Trainer.save_checkpoint")


# Two blocks of 40 MiB, freed and asked for again ten times: by default glibc always maps blocks above 32 MiB anew.
PROGRAM = """
import resource, torch
from lightning_spectral.plugin.processes import tune_allocator
torch.set_num_threads(1)
if {tuned}:
    assert tune_allocator()
def churn():
    for _ in range(10):
        torch.zeros(10 * 2**20) + 1
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(tuned: bool) -> int:
    program = [sys.executable, "-c", PROGRAM.format(tuned=tuned)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return int(subprocess.run(program, capture_output=True, text=True, check=True, env=clean).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_tuned_process_takes_no_page_faults_for_memory_it_had() -> None:
    default, tuned = page_faults(tuned=False), page_faults(tuned=True)
    assert default >= 10 * 2 * 20  # control: every block is mapped anew, at most 2 MiB per fault
    assert tuned <= default / 5  # at most one pair of blocks still faults after the first ten


@pytest.mark.skipif(platform.libc_ver()[0] == "glibc", reason="only where the C library is another")
def test_elsewhere_nothing_is_changed() -> None:
    assert not ls.plugin.tune_allocator()
