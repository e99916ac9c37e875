"""The cost of the server's part of a round, compared with the clients' training: a ResNet-18 at keep ratio 0.2.

    python benchmarks/refresh.py

Two tables from one run on one thread, with contenders taking turns. One gives the milliseconds to factorise single
weights: LAPACK's gesdd in float64 on the matrix as stored, the same on its tall orientation, and `factorize`, for
weights with Gaussian entries and for weights whose singular values fall like 1 / i, as those of trained layers do; then
`factorize`, and `leading_factors` for a tenth of the terms, of weights whose other terms are a thousand times smaller,
as after a spectral start and a few rounds. The other covers rounds of 10 clients with 500 examples each, batch size 32
and two local epochs: 10 x 2 x 16 = 320 local steps. Only a few of these are taken for each client; the training time of
a round is 320 times their median time. The goals are that the refresh takes at most 3% of a round, and making the
sub-models less than 1%.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from page import write
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.client.device import StepActions
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.user_optimizer import LocalOptimizer, options_of
from lightning_spectral.designs import ConditionalPoisson
from lightning_spectral.functional.spectra import factorize, leading_factors, num_terms_for
from lightning_spectral.models import ResNet18
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.tables import aligned

COHORT, EXAMPLES, BATCH_SIZE, LOCAL_EPOCHS = 10, 500, 32, 2
NUM_STEPS = COHORT * LOCAL_EPOCHS * -(-EXAMPLES // BATCH_SIZE)
SHARDING = ls.SpectralSharding(ls.Collective(), keep_ratio=0.2)
RESNET_SHAPES = [(64, 576), (128, 576), (128, 1152), (256, 1152), (256, 2304), (512, 2304), (512, 4608)]
SHORTCUT_SHAPES = [(128, 64), (256, 128), (512, 256)]
TRANSFORMER_SHAPES = [(256, 256), (768, 256), (512, 256), (768, 768), (2304, 768), (3072, 768), (768, 3072)]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def gesdd_as_stored(weight: Tensor) -> object:
    return torch.linalg.svd(weight.double(), full_matrices=False)


def gesdd_tall(weight: Tensor) -> object:
    rows, columns = weight.shape
    return torch.linalg.svd((weight if rows >= columns else weight.T.contiguous()).double(), full_matrices=False)


def falling(weight: Tensor) -> Tensor:
    """Return the matrix with the same singular vectors and singular values 1 / i."""
    U, s, Vh = torch.linalg.svd(weight.double(), full_matrices=False)
    return ((U / torch.arange(1, len(s) + 1)) @ Vh).float()


def steep(weight: Tensor, num_terms: int) -> Tensor:
    """Return the matrix with all terms but the first ones at a thousandth."""
    U, s, Vh = torch.linalg.svd(weight.double(), full_matrices=False)
    s[num_terms:] *= 1e-3
    return ((U * s) @ Vh).float()


def shapes_table(turns: int) -> list[list[str]]:
    rows = [["c_out, c_in k", "gesdd as stored", "gesdd tall", "factorize", "of tall", "1 / i", "of tall"]]
    rows[0] += ["after a start", "a tenth of its terms", "of all"]
    generator = torch.Generator().manual_seed(0)
    for shape in RESNET_SHAPES + SHORTCUT_SHAPES + TRANSFORMER_SHAPES:
        gaussian = torch.randn(shape, generator=generator)
        falls, num_terms = falling(gaussian), num_terms_for(min(shape), 0.1)
        contenders = [partial(f, gaussian) for f in (gesdd_as_stored, gesdd_tall, factorize)]
        contenders += [partial(f, falls) for f in (gesdd_tall, factorize)]
        first = steep(gaussian, num_terms)
        contenders += [partial(factorize, first), partial(leading_factors, first, num_terms)]
        times = [[seconds(contender) for contender in contenders] for _ in range(turns)]
        stored, tall, ours, falls_tall, falls_ours, whole, tenth = (
            1e3 * min(column) for column in zip(*times, strict=True)
        )
        cells = [f"{stored:.2f}", f"{tall:.2f}", f"{ours:.2f}", f"{ours / tall:.2f}"]
        rows.append([str(shape)[1:-1], *cells, f"{falls_ours:.2f}", f"{falls_ours / falls_tall:.2f}"])
        rows[-1] += [f"{whole:.2f}", f"{tenth:.2f}", f"{tenth / whole:.2f}"]
    return rows


def play(server: nn.Module, round_idx: int, steps: int, took: dict[str, list[float]]) -> None:
    """Play one round, stage by stage like the engine; ``took`` collects the seconds of each stage."""
    template = torch.optim.SGD(server.parameters(), lr=0.01, momentum=0.9)
    names = {id(parameter): name for name, parameter in server.named_parameters()}
    half = SHARDING.bind(server)
    side, forms = half.client_side, Forms(server, half.client_side.take_form, (template,))
    with forms.client(0.2):  # builds the form, as the first round does
        pass
    cohort = Cohort(0, round_idx, {0.2: tuple(WorkUnit(c, coefficient=EXAMPLES) for c in range(COHORT))})
    stage: dict[str, float] = defaultdict(float)

    start = time.perf_counter()
    opened = half.open(cohort)
    stage["refresh"] = time.perf_counter() - start
    parts_of_refresh(server, stage)
    for unit in cohort.groups[0.2]:
        start = time.perf_counter()
        download, receipt = opened.send(unit)
        drawn = time.perf_counter()
        with forms.client(0.2, download.tensors.keys()) as client:
            side.load(client, download)
            loaded = time.perf_counter()
            LocalOptimizer(template, names, client, side.stand_ins(client)).start_client(options_of(template))
            took["step"] += local_steps(client, template, side.start(client, download), steps)
            trained = time.perf_counter()
            upload = side.collect(client, download)
        assert upload.can_be_averaged()
        opened.add(receipt, upload)
        stage["sample"] += drawn - start
        stage["load"] += loaded - drawn
        stage["aggregate"] += time.perf_counter() - trained
    stage["apply"] = seconds(opened.close)
    template.step()
    for name, value in stage.items():
        took[name].append(value)


def parts_of_refresh(server: nn.Module, stage: dict[str, float]) -> None:
    """Time the parts of the refresh separately, by repeating them: factorisation, strategy and design."""
    for block in SHARDING.plan(server).blocks.values():
        weight = block.matrix(server.get_parameter(block.parameter))
        start = time.perf_counter()
        s = factorize(weight).s
        factorised = time.perf_counter()
        n = num_terms_for(len(s), 0.2)
        probs, _ = SHARDING.strategy(s, n, COHORT)
        solved = time.perf_counter()
        ConditionalPoisson().fit(probs)
        stage["  of it factorisation"] += factorised - start
        stage["  of it strategy"] += solved - factorised
        stage["  of it design"] += time.perf_counter() - solved


def local_steps(client: nn.Module, optimizer: torch.optim.Optimizer, actions: StepActions, steps: int) -> list[float]:
    x, labels = torch.randn(BATCH_SIZE, 3, 32, 32), torch.randint(10, (BATCH_SIZE,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(client(x), labels).backward()
        actions.before_step(optimizer)
        optimizer.step()

    return [seconds(step) for _ in range(steps)]


def round_table(turns: int, steps: int) -> tuple[list[list[str]], dict[str, float]]:
    torch.manual_seed(0)
    server, took = ResNet18(), defaultdict(list)
    for round_idx in range(turns + 1):
        if round_idx == 1:
            took.clear()  # the first round warms up
        play(server, round_idx, steps, took)
    median = {name: statistics.median(values) for name, values in took.items()}
    median["training, extrapolated"] = NUM_STEPS * median.pop("step")
    whole = sum(value for name, value in median.items() if not name.startswith(" "))
    share = {name: value / whole for name, value in median.items()}
    rows = [["stage", "seconds", "share of the round"]]
    rows += [[name, f"{median[name]:.3f}", f"{share[name]:.2%}"] for name in median]
    return rows, share


def show(title: str, rows: list[list[str]]) -> None:
    print(f"\n{title}\n", *aligned(rows), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="turns of each contender, and rounds")
    parser.add_argument("--steps", type=int, default=2, help="local steps of each client")
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, share = round_table(options.turns, options.steps)
    show(f"One round of a ResNet-18; training is {NUM_STEPS} x the median local step", rows)
    made = share["sample"] + share["load"]
    goals = [
        ["goal", "measured", "met"],
        ["refresh: at most 3% of a round", f"{share['refresh']:.2%}", str(share["refresh"] <= 0.03)],
        ["sub-models, sample and load: below 1%", f"{made:.2%}", str(made < 0.01)],
    ]
    show("Goals", goals)
    shapes = shapes_table(options.turns)
    show("Factorisation of single weights in float32, ms", shapes)
    if options.write:
        write("factorise", {"torch": torch.__version__}, shapes)


if __name__ == "__main__":
    main()
