"""The documentation does what it says: every Python block runs, prints what is shown, and the lists are complete."""

import ast
import csv
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import mode
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
from public_names import PLACES

import lightning_spectral as ls
from lightning_spectral.plugin.user_hooks import REFUSED_HOOKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# A Python block, and the output that is shown right below it, if any.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```$)?", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted(DOCS.glob("*.md")) if BLOCK.search(page.read_text())]


# What the reader has already.
GIVEN = {"index.md": "from toy_models import LitMLP as YourModule, toy_examples; train = val = toy_examples()"}


class ToyTrainer(pl.Trainer):
    """A Trainer of at most three rounds that shows no bar."""

    def __init__(self, *, max_epochs: int = 3, **settings: Any) -> None:
        super().__init__(
            max_epochs=min(max_epochs, 3), **{"accelerator": "cpu", "enable_progress_bar": False, **settings}
        )


@pytest.fixture
def toy_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    importlib.import_module("lightning.pytorch.cli")  # it keeps the Trainer that is there when it is first imported
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pl, "Trainer", ToyTrainer)
    monkeypatch.setattr(lightning, "Trainer", ToyTrainer)


def blocks(page: Path) -> Iterator[tuple[Any, str | None]]:
    """Compiled Python blocks, with the page's own line numbers, and the output shown below each."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, block.start("code"))
        yield compile("\n" * lines_before + block["code"], str(page), "exec"), block["shown"]


@pytest.mark.usefixtures("toy_size")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")  # a resumed run writes beside the first
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers for it
@pytest.mark.filterwarnings("ignore:The PEFT config's `base_model_name_or_path`")  # of a model that was not downloaded
@pytest.mark.sampled(4)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_runs_and_prints_what_is_shown(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(page.stem)
    monkeypatch.setitem(sys.modules, page.stem, module)  # pickle looks for the page's classes there
    namespace = vars(module)
    exec(GIVEN.get(page.name, ""), namespace)
    for code, shown in blocks(page):
        printed = StringIO()
        with redirect_stdout(printed), torch.random.fork_rng(devices=[]):
            exec(code, namespace)
        if shown is not None:
            same = OutputChecker().check_output(shown, printed.getvalue(), ELLIPSIS | NORMALIZE_WHITESPACE)
            assert same, f"{page.name} shows\n{shown}\nbut the block prints\n{printed.getvalue()}"


@pytest.mark.slow
def test_the_readme_trains_as_it_says(monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn", reason="comes with the `examples` extra")
    monkeypatch.chdir(tmp_path)
    (short, _), (whole, _) = blocks(ROOT / "README.md")
    with torch.random.fork_rng(devices=[]):
        exec(whole, namespace := {"__name__": "readme"})
    assert "of the test images, 60 rounds" in capsys.readouterr().out
    # 95.3 % where the README was written; over three seeds and the last ten rounds 94.6 to 95.8 %
    assert namespace["trainer"].callback_metrics["accuracy"] > 0.8
    plan = ls.validate(namespace["LitMLP"](), torch.zeros(2, 64))  # `ls.validate(module, example_input)`, as it says
    assert plan.sharded_weights == ("net.2.weight",)
    with torch.random.fork_rng(devices=[]):
        toy = {"pl": SimpleNamespace(Trainer=ToyTrainer), "YourModule": namespace["LitMLP"], "val": namespace["test"]}
        exec(short, {**namespace, **toy})


def test_the_readme_has_two_set_up_commands_and_code_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum(line.startswith("pip install") and " && " in line for line in lines) == 2
    assert lines.index("```python") < 35


def test_the_reference_has_every_public_name_and_no_other() -> None:
    reference = (DOCS / "api.md").read_text()
    paths = [name if name in ls.__all__ else f"{place}.{name}" for name, place in PLACES.items()]
    assert not [path for path in paths if not re.search(rf"^\.\. auto\w+:: {path}$", reference, re.MULTILINE)]
    module = ls.__name__
    for kind, path in re.findall(r"^\.\. (auto\w+|module):: (\S+)$", reference, re.MULTILINE):
        if kind == "module":
            module = path
        elif ".network.flower." not in path or find_spec("flwr"):
            pkgutil.resolve_name(path if path.startswith(ls.__name__) else f"{module}.{path}")  # raises if not there


def test_pages_name_attributes_that_classes_have() -> None:
    known: dict[str, str] = {}
    bases: dict[str, list[str]] = {}
    for path in Path(ls.__file__).parent.rglob("*.py"):
        lines = path.read_text().splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.ClassDef):
                known[node.name] = known.get(node.name, "") + "\n".join(lines[node.lineno - 1 : node.end_lineno])
                bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]

    def has(name: str, attribute: str) -> bool:
        own = re.search(rf"(def |self\.){attribute}\b|\b{attribute}\b[^\n]* = |\b{attribute}: ", known[name])
        inherited = any(base in known and has(base, attribute) for base in bases[name])
        return own is not None or inherited or hasattr(pl.LightningModule, attribute)

    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    named = {pair for page in pages for pair in re.findall(r"`([A-Z]\w+)\.([a-z]\w*)", page.read_text())}
    assert {("Round", "send"), ("FederatedModule", "configure_callbacks")} <= named
    assert not [pair for pair in named if pair[0] in known and not has(*pair)]


def test_formulas_become_mathml_and_a_command_that_cannot_be_shown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="comes with the `docs` extra")
    pytest.importorskip("sphinx", reason="comes with the `docs` extra")
    monkeypatch.syspath_prepend(DOCS)
    mathml = importlib.import_module("mathml").mathml
    shown = mathml(r"r < \frac{M}{N + \pi_i}", "inline")
    assert "<mfrac>" in shown
    assert "<msub>" in shown
    assert "\\" not in shown
    with pytest.raises(ValueError, match=r"unknown commands: \\nosuch"):
        mathml(r"\nosuch{x}", "inline")


def test_letters_of_figures_have_ten_pixels_on_a_phone() -> None:
    """In a PNG, letters have nine points, and an inch 150 dots."""
    narrow = (DOCS / "_static/pages.css").read_text().partition("@media (max-width: 46em)")[2]
    (usual,) = re.findall(r"\.gallery img { max-width: none; width: (\d+)em; }", narrow)
    ((wide, large),) = re.findall(r"\n  (article img\[src.*) { max-width: none; width: (\d+)em; }", narrow)
    for path in [*DOCS.glob("*.svg"), *DOCS.glob("*.png"), *DOCS.glob("paper/*.png")]:
        points, letters = int.from_bytes(path.read_bytes()[16:20], "big") / 150 * 72, 9.0
        if path.suffix == ".svg":
            text = path.read_text()
            points = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])
            letters = float(mode(re.findall(r'font(?:-size)?(?:: |=")([\d.]+)', text)))
        chosen = large if any(word in path.name for word in re.findall(r'\*="(\w+)"', wide)) else usual
        assert 16 * int(chosen) * letters / points >= 10, path


def test_the_gallery_has_every_figure_and_its_commands_exist() -> None:
    gallery = (DOCS / "gallery.md").read_text()
    shown = re.findall(r"^```{figure} (\S+)$", gallery, re.MULTILINE)
    own = [figure for figure in shown if "/" not in figure]
    assert sorted(own) == sorted(path.name for path in DOCS.iterdir() if path.suffix in (".png", ".svg"))
    assert all((DOCS / figure).exists() for figure in shown)
    scripts = re.findall(r"`python ([^\s`]+)", gallery)
    assert len(scripts) > 5
    assert not [script for script in scripts if not (ROOT / script).exists()]


HOOKS = (DOCS / "hooks.md").read_text()


def test_the_hooks_page_names_every_refused_hook() -> None:
    assert not [hook for hook in REFUSED_HOOKS if f"`{hook}`" not in HOOKS]


@pytest.mark.filterwarnings("ignore:You have overridden `on_:UserWarning")  # Lightning, of modules with batch hooks
@pytest.mark.filterwarnings("ignore:You have overridden `tra:UserWarning")
def test_hooks_run_where_the_hooks_page_says(lit_mlp, toy, quiet, tmp_path):
    on_clients, at_server = (
        set(
            re.findall(
                r"`([a-z_]+)`",
                HOOKS.partition(title)[2].partition("\n\n`forward`" if "server" in title else "\n\n**")[0],
            )
        )
        for title in ("**While a client trains**", "**At the server:**")
    )
    moves = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
    at_server |= {f"on_{s}_{w}" for s in ("validation", "test") for w in ("start", "end", "epoch_start", "epoch_end")}
    found: dict[str, set[str]] = {}

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            found.setdefault(name, set()).add("server" if isinstance(self.net[2], torch.nn.Linear) else "client")
            return getattr(super(kind, self), name)(*args)

        hook.__signature__ = inspect.signature(getattr(lit_mlp, name))  # type: ignore[attr-defined]
        return hook

    hooks = [name for name in on_clients | at_server if hasattr(pl.LightningModule, name)]
    kind = type("LitNoting", (lit_mlp,), {name: noting(name) for name in hooks})
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4), val=toy, test=toy, batch_size=30)

    def run(**options: Any) -> None:
        model = ls.FederatedModule(kind(), algorithm=ls.SpectralSharding(keep_ratio=0.4), clients_per_round=2)
        trainer = pl.Trainer(**quiet, max_epochs=1)
        trainer.fit(model, data, **options)
        trainer.test(model, data, verbose=False)
        trainer.predict(model, torch.utils.data.DataLoader(toy.tensors[0], batch_size=60))
        trainer.save_checkpoint(tmp_path / "one.ckpt")

    run()
    run(ckpt_path=tmp_path / "one.ckpt")
    assert {name for name in hooks if "client" in found[name]} == on_clients - {"None"} | moves
    assert {name for name in hooks if "server" in found[name]} == at_server & set(hooks) | moves


def test_the_metrics_page_names_every_round_metric(lit, toy, fit):
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4))
    (row,) = fit(lit, data, algorithm=ls.SpectralSharding(), clients_per_round=2).history.rows
    page = (DOCS / "metrics.md").read_text()
    assert not [name for name in row if name.startswith("fl/") and f"`{name}`" not in page]


def test_the_performance_page_shows_figures_that_its_tables_have() -> None:
    page = (DOCS / "performance.md").read_text()
    tables = [(DOCS / path).read_text().splitlines() for path in re.findall(r"\((tables/\w+\.csv)\)", page)]
    measured = {cell.split(" (")[0] for lines in tables for row in csv.reader(lines) for cell in row}
    shown = re.findall(r"(?<=\| )[\d.,]+(?= \|)", page)
    assert len(shown) > 80
    assert not [number for number in shown if number not in measured]
