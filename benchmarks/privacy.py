"""Accuracy at equal epsilon: federated averaging beside spectral sharding and LoRA, with noise on different things.

    python benchmarks/privacy.py
    python benchmarks/privacy.py --tasks images speech
    python benchmarks/privacy.py --tasks patients scans --seeds 1
    python benchmarks/privacy.py --steps

Each task but ``patients`` and ``scans`` is dealt to many clients with few examples each, since epsilon counts clients.
There it counts examples: of the digits, on eight clients (`ExamplePrivacy`), with a narrow network or a convolutional
one. ``--steps`` compares the time of local steps with and without it, in interleaved runs. ``digits``: the README's
network, twice as wide, on scikit-learn's digits. ``images``: the study's plain GroupNorm net on its MNIST images.
``speech``: a small GPT-2, pre-trained on Shakespeare's comedies, on the speakers of the other plays; it needs
transformers, and the plays are downloaded once. For each epsilon, every system has its own best clip and learning rate:
it climbs a ladder of each until all neighbours are worse, by the figure on the test data with seed 0. The search itself
is not counted. Figures are means of the last five rounds, over three seeds. Runs are kept in ``privacy.jsonl``, and
only those that are missing are made.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from page import show
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import lightning_spectral as ls
from lightning_spectral.algorithms import FrozenA, PaddedFactors, TermMeans
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.local_loop import LocalLoop, LocalSettings, LocalTask, Placement, Recorder
from lightning_spectral.filters.example_privacy import ExampleLoop
from lightning_spectral.plugin.trainer import silence, silent_trainer
from lightning_spectral.protocol.records import Download, WorkUnit

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "studies/any_network"), str(ROOT / "examples")]  # imported only where their packages are needed
SEEDS = 3
EPSILONS = (2.0, 8.0, None)  # no privacy, with the same sampling
FEDAVG = {"FedAvg": ls.FedAvg()}


def sharding(keep_ratio):
    return {
        "sharding, noise on factors": ls.SpectralSharding(ls.TopN(), keep_ratio, aggregation=TermMeans()),
        "sharding, noise on matrices": ls.SpectralSharding(ls.TopN(), keep_ratio),
    }


ADAPTERS = {
    "LoRA, A fixed": ls.LoRA(4, aggregation=FrozenA()),
    "LoRA, both factors": ls.LoRA(4, aggregation=PaddedFactors()),
    "LoRA, factorised anew": ls.LoRA(4),
}


@dataclass
class Task:
    """What is trained, and how much of it.

    Attributes:
        federation: Called with seed and learning rate; returns a module, and its data dealt to the clients.
        systems: What is compared.
        figure: Name of what the module logs in validation.
        shown: What is shown for it.
        more_is_better: Whether it is an accuracy, and not a loss.
        of_examples: Whether epsilon counts examples, and not clients.
        epsilons: What is compared; ``None`` for no privacy.
        active: Clients that are expected in a round.
        rounds: Number of rounds.
        local_epochs: Passes over a client's data in a round.
        delta: Well below one over the number of clients.
        clips: A ladder of bounds, in units of the weights.
        rates: A ladder of learning rates of clients.
        start: Where a search begins.
    """

    federation: Callable[[int, float], tuple[pl.LightningModule, ls.FederatedDataModule]]
    systems: dict[str, ls.Algorithm]
    figure: str
    rates: Sequence[float]
    start: tuple[float, float]
    clips: Sequence[float] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    rounds: int = 40
    local_epochs: int = 3
    active: int = 50
    delta: float = 1e-4
    shown: Callable[[float], float] = lambda accuracy: 100 * accuracy
    more_is_better: bool = True
    of_examples: bool = False
    epsilons: Sequence[float | None] = EPSILONS


class LitDigits(pl.LightningModule):
    def __init__(self, lr, net):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def mlp(width=256):
    hidden = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def cnn():
    """Two convolutions of 16 and 32 channels."""
    layers = [nn.Unflatten(1, (1, 8, 8))]
    for channels, out in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def digits(seed, lr, num_clients=250, batch_size=6, net=mlp):
    """1,500 images on 250 clients."""
    images, labels = load_digits(return_X_y=True)
    examples = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train, test = random_split(examples, [1500, 297], torch.Generator().manual_seed(seed))
    clients = ls.IIDPartitioner(num_clients)
    data = ls.FederatedDataModule(train, clients, val=test, batch_size=batch_size, eval_batch_size=297)
    return LitDigits(lr, net()), data


@cache
def mnist(seed):
    from tasks import divided

    return divided("MNIST", seed)


def images(seed, lr):
    """4,000 images on 400 clients."""
    from tasks import Classifier

    train, others = mnist(seed)
    data = ls.FederatedDataModule(train, ls.IIDPartitioner(400), val=others, batch_size=10, eval_batch_size=1000)
    return Classifier("plain, GroupNorm", lr, TASKS["images"].rounds), data


@cache
def speakers():
    """What each of them says, in sequences."""
    import lora_shakespeare as play

    spoken = {who: text for who, text in play.shakespeare().items() if who[0] not in play.COMEDIES}
    return [play.windows(text)[:9] for text in spoken.values() if len(text) >= 6 * play.LENGTH + 1]


def speech(seed, lr):
    """The speakers with at least 288 characters, of whom at most eight sequences train and one is for testing."""
    import lora_shakespeare as play

    parts = speakers()
    who_says = [who for who, part in enumerate(parts) for _ in part[1:]]
    data = ls.FederatedDataModule(
        play.next_characters(torch.cat([part[1:] for part in parts])),
        ls.NaturalPartitioner(who_says),
        val=play.next_characters(torch.cat([part[:1] for part in parts])),
        batch_size=4,
        eval_batch_size=512,
        seed=seed,
    )
    folder = ROOT / "outputs/lora_shakespeare"
    return play.LitGPT2(play.pretrained(folder, play.PRETRAINING_STEPS), lr), data


def patients(net, lr):
    """Examples that are hidden, of eight clients; the search begins at a rate."""
    return Task(
        partial(digits, num_clients=8, batch_size=32, net=net),
        FEDAVG | {"sharding": ls.SpectralSharding(ls.TopN(), 0.1), "LoRA": ls.LoRA(4)},
        "accuracy",
        rates=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        start=(1.0, lr),
        rounds=15,
        local_epochs=1,
        active=8,
        of_examples=True,
        epsilons=(8.0, None),
    )


TASKS = {
    "digits": Task(digits, FEDAVG | sharding(0.1), "accuracy", rates=(0.01, 0.03, 0.1, 0.3, 1.0), start=(0.1, 0.3)),
    "patients": patients(partial(mlp, 64), 1.0),
    "scans": patients(cnn, 0.1),
    "images": Task(images, FEDAVG | sharding(0.1), "test", rates=(0.1, 0.2, 0.4, 0.8, 1.6, 3.2), start=(0.3, 0.2)),
    "speech": Task(
        speech,
        FEDAVG | ADAPTERS,
        "val_loss",
        rates=(6.25e-5, 2.5e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2),
        start=(0.1, 4e-3),
        rounds=20,
        local_epochs=1,
        shown=math.exp,  # perplexity
        more_is_better=False,
    ),
}


class LastRounds(pl.Callback):
    """The mean of a figure in the last five rounds."""

    def __init__(self, figure):
        self.figure, self.found = figure, []

    def on_validation_end(self, trainer, pl_module):
        self.found.append(float(trainer.callback_metrics[self.figure]))

    @property
    def mean(self):
        return statistics.fmean(self.found[-5:])


def trained(name, system, epsilon, clip, lr, seed):
    """The figure that a run ends with."""
    torch.manual_seed(seed)
    task = TASKS[name]
    module, data = task.federation(seed, lr)
    length = {"num_epochs": task.rounds * task.local_epochs} if task.of_examples else {"num_rounds": task.rounds}
    kind = ls.ExamplePrivacy if task.of_examples else ls.ClientPrivacy
    budget = {"delta": task.delta, "target_epsilon": epsilon, "noise_seed": seed, **length}
    private = [] if epsilon is None else [kind(clip=clip, **budget)]
    model = ls.FederatedModule(
        module,
        algorithm=task.systems[system],
        participation=ls.Uniform(active=task.active),
        local_epochs=task.local_epochs,
        filters=private,
        seed=seed,
    )
    last = LastRounds(task.figure)
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.SpectralWarning)  # of noise that is larger than a weight
        trainer = silent_trainer(max_epochs=task.rounds, accelerator="cpu", devices=1, callbacks=[last])
        try:
            trainer.fit(model, data)
        except ls.errors.RoundError:  # weights that are not finite are a result, too
            return math.nan
    return last.mean


class Kept:
    """Runs in a file, one line each."""

    def __init__(self, path):
        self.path = path
        self.found = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}

    def __call__(self, *run):
        key = json.dumps(run)
        if key not in self.found:
            self.found[key] = trained(*run)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.found[key]]) + "\n")
            print(key, f"{self.found[key]:.3f}", flush=True)
        return self.found[key]


def climbed(task, epsilon, figure):
    """The clip and rate of which all neighbours on their ladders are worse; without privacy, clips do not count."""
    clips, rates = task.clips if epsilon else task.start[:1], task.rates

    def worth(place):
        found = figure(clips[place[0]], rates[place[1]])
        return -math.inf if math.isnan(found) else found if task.more_is_better else -found

    best, at = (clips.index(task.start[0]), rates.index(task.start[1])), None
    while best != at:
        at = best
        near = [at, *((at[0] + i, at[1] + j) for i, j in ((0, 1), (0, -1), (1, 0), (-1, 0)))]
        best = max((p for p in near if 0 <= p[0] < len(clips) and 0 <= p[1] < len(rates)), key=worth)
    return clips[at[0]], rates[at[1]]


def table(name, run, seeds):
    """Print the best of each system at each epsilon."""
    task = TASKS[name]
    rows = [(name, *("no noise" if e is None else f"epsilon {e:g}" for e in task.epsilons))]
    for system in task.systems:
        cells = []
        for epsilon in task.epsilons:
            best = climbed(task, epsilon, lambda *choice, e=epsilon, s=system: run(name, s, e, *choice, 0))
            found = [task.shown(run(name, system, epsilon, *best, seed)) for seed in range(seeds)]
            chosen = f"clip {best[0]:g}, " if epsilon else ""
            deviation = f" ± {statistics.stdev(found):.2f}" if seeds > 1 else ""
            cells.append(f"{statistics.fmean(found):.2f}{deviation} ({chosen}lr {best[1]:g})")
        rows.append((system, *cells))
    show(rows)


def steps():
    """Print how many times as long a local step on 32 images of MNIST's size takes with `ExamplePrivacy`."""

    class Net(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.net = nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *layers, nn.Flatten(), nn.LazyLinear(10))
            self.net(torch.zeros(2, 784))

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def conv(channels, out):
        return nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(), nn.MaxPool2d(2)

    nets = {"MLP": Net(nn.Flatten(), nn.Linear(784, 64), nn.ReLU()), "CNN": Net(*conv(1, 16), *conv(16, 32))}
    examples, privacy = BatchSource(TensorDataset(torch.randn(640, 784), torch.arange(640) % 10)), ls.ExamplePrivacy
    data = ClientData(examples, torch.arange(640), 32, seed=0, ids=(0, 0))
    rows = [("network", "parameters", "ms", "private, ms", "ratio")]
    for name, net in nets.items():
        settings = LocalSettings(Placement(moves_batches=False), defines=lambda *_: False)
        known = net, [torch.optim.SGD(net.parameters(), lr=0.01)], settings
        private = ExampleLoop(privacy(clip=1.0, noise_multiplier=1.0, delta=1e-4), int, *known)
        loops, seconds = (LocalLoop(*known), private), ([], [])
        for _ in range(5):
            for loop, found in zip(loops, seconds, strict=True):
                start = time.process_time()
                loop(LocalTask(Download(WorkUnit(0), 1.0, {}), data, Recorder(net)))
                found.append((time.process_time() - start) / data.num_batches * 1e3)
        plain, own = map(statistics.median, seconds)
        size = sum(p.numel() for p in net.parameters())
        rows.append((name, f"{size:,}", f"{plain:.2f}", f"{own:.1f}", f"{own / plain:.1f}"))
    show(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits"])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", action="store_true", help="compare the time of local steps, and nothing else")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Kept(options.file)
    for name in [] if options.steps else options.tasks:
        table(name, run, options.seeds)
    if options.steps:
        steps()


if __name__ == "__main__":
    main()
