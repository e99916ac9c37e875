"""Every model from the papers: its size, that it learns, that clients can train it; and what the room imports."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from federation import Fit, seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral import models
from lightning_spectral.nn import plan_layers

Build = Callable[[], nn.Module]

# Small enough for a test, with every part that the real one has. Classes: 4.
TINY: dict[str, Build] = {
    "mlp": lambda: models.MLP(in_features=12, hidden_features=(16, 16), num_classes=4),
    "cnn": lambda: models.FEMNISTCNN(num_classes=4, image_size=8, channels=(4, 8), hidden_features=16),
    "cnn without hidden layer": lambda: models.FEMNISTCNN(4, image_size=8, channels=(4, 8), hidden_features=None),
    "resnet": lambda: models.ResNet18(num_classes=4, width=4, image_size=8),
    "cct": lambda: models.CCT(num_classes=4, image_size=8, width=16, num_heads=2, num_layers=2),
    "gpt": lambda: models.CharTransformer(vocab_size=4, context_length=6, width=16, num_heads=2, num_layers=2),
    "lstm": lambda: models.LSTMClassifier(num_classes=4, vocab_size=7, embedding_dim=8, hidden_size=16),
}

# Number of parameters that the source (test id) states, or that its table adds up to.
SIZES: dict[str, tuple[Build, int]] = {
    "2NN of McMahan et al., section 3": (models.MLP, 199_210),
    "CNN of McMahan et al., section 3": (lambda: models.FEMNISTCNN(num_classes=10, hidden_features=512), 1_663_370),
    "LEAF, layers of models/femnist/cnn.py": (
        models.FEMNISTCNN,
        (25 * 32 + 32) + (25 * 32 * 64 + 64) + (7 * 7 * 64 * 2048 + 2048) + (2048 * 62 + 62),
    ),
    "PriSM, layers of model/femnist.py": (
        lambda: models.FEMNISTCNN(hidden_features=None),
        (25 * 32 + 32) + (25 * 32 * 64 + 64) + (3136 * 62 + 62),
    ),
    # kuangliu/pytorch-cifar's ResNet-18; GroupNorm has as many parameters as BatchNorm
    "ResNet-18 with a 3x3 stem, 10 classes": (models.ResNet18, 11_173_962),
    "PriSM, Table 6": (
        lambda: models.LSTMClassifier(num_classes=1),
        1001 * 64 + 4 * 256 * (64 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + (256 + 1),
    ),
    # transformers' GPT2Model has 124,439,808; the head of the language model is not tied here
    "GPT-2 small with a head of its own": (
        lambda: models.CharTransformer(50257, context_length=1024, width=768, num_heads=12, num_layers=12),
        124_439_808 + 50257 * 768,
    ),
    "the character transformer's docstring": (models.CharTransformer, 628_352),
    "CCT's docstring": (models.CCT, 3_326_923),
}


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layer_macs(model: nn.Module, inputs: Tensor) -> int:
    """Multiply-adds of linear layers and convolutions: outputs times the weights that each of them reads."""
    counts: list[int] = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(lambda own, args, out: counts.append(out.numel() * own.weight[0].numel()))
    model(inputs)
    return sum(counts)


def examples(name: str, num_examples: int) -> tuple[Tensor, Tensor]:
    """Inputs of the tiny model, and random targets."""
    generator = torch.Generator().manual_seed(1)
    shape = (num_examples, *seeded(TINY[name]).example_input().shape[1:])
    if name == "gpt":
        characters = torch.randint(4, (num_examples, shape[1] + 1), generator=generator)
        return characters[:, :-1], characters[:, 1:]
    targets = torch.randint(4, (num_examples,), generator=generator)
    if name == "lstm":
        return torch.randint(1, 7, (num_examples, 10), generator=generator), targets
    return torch.randn(shape, generator=generator), targets


def task(name: str) -> models.LitClassifier:
    return (models.LitNextToken if name == "gpt" else models.LitClassifier)(seeded(TINY[name]), num_classes=4, lr=0.05)


@pytest.mark.parametrize(("make", "size"), SIZES.values(), ids=SIZES.keys())
def test_the_model_has_the_size_of_its_source(make: Build, size: int) -> None:
    with torch.device("meta"):
        assert num_parameters(make()) == size


def test_cct_has_the_size_and_the_cost_that_its_authors_state() -> None:
    model = models.CCT()
    assert f"{num_parameters(model) / 1e6:.3f}M" == "3.327M"
    assert f"{layer_macs(model, model.example_input()) / 1e9:.3f}G" == "0.241G"


def test_resnet_has_the_size_and_the_cost_of_prism_table_10() -> None:
    model = models.ResNet18()
    assert round(num_parameters(model) / 1e6) == 11
    macs = layer_macs(model, model.example_input())
    assert round(macs / 1e6) == 555
    # The table's 35 G for 32 images is rounded down, and counts two operations for each multiply-add.
    assert int(2 * 32 * macs / 1e9) == 35


@pytest.mark.parametrize("name", TINY)
def test_the_example_input_fits_and_gives_one_row_of_logits(name: str) -> None:
    model = seeded(TINY[name])
    assert model(model.example_input()).shape == ((1, 6, 4) if name == "gpt" else (1, 4))


@pytest.mark.parametrize("name", TINY)
def test_examples_of_a_batch_do_not_see_each_other(name: str) -> None:
    model = seeded(TINY[name]).eval()
    inputs, _ = examples(name, 3)
    torch.testing.assert_close(model(inputs), torch.cat([model(inputs[[i]]) for i in range(3)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TINY)
def test_the_model_fits_eight_examples_to_a_fiftieth_of_the_loss(name: str) -> None:
    model = seeded(TINY[name]).eval()  # dropout would leave a floor under the loss
    inputs, targets = examples(name, 8)
    if name == "gpt":  # targets that the sequence determines
        targets = inputs.roll(1, dims=1)
        targets[:, 0] = 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(200 if name == "gpt" else 100):  # whose loss jumps in the first hundred steps
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50  # over four seeds, the slowest model falls at least to a 320th


@pytest.mark.parametrize("name", TINY)
def test_the_example_input_of_a_task_shows_which_layers_run(name: str) -> None:
    plan = plan_layers(task(name))
    assert not plan.problems
    assert all(layer.in_forward for layer in plan.layers)
    assert plan.sharded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TINY)
def test_clients_train_every_parameter_in_a_round(name: str, fit: Fit) -> None:
    lit = task(name)
    before = {key: value.clone() for key, value in lit.state_dict().items()}
    train = TensorDataset(*examples(name, 24))
    data = ls.FederatedDataModule(train, ls.IIDPartitioner(num_clients=3), val=train, batch_size=4)
    (row,) = fit(lit, data, algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=2).rows
    assert not [key for key, value in lit.state_dict().items() if torch.equal(value, before[key])]
    assert {"train_loss", "train_accuracy", "val_loss", "val_accuracy"} <= row.keys()
    assert row["train_loss"] == pytest.approx(row["fl/loss"])


PACKAGE = Path(ls.__file__).parent
MODELS = PACKAGE / "models"


def our_imports(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("from lightning_spectral")]


def test_models_import_only_each_other() -> None:
    imports = [line for file in MODELS.glob("*.py") for line in our_imports(file)]
    assert imports
    assert all(line.startswith("from lightning_spectral.models.") for line in imports)


def test_the_package_does_not_import_its_models() -> None:
    others = [file for file in PACKAGE.rglob("*.py") if MODELS not in file.parents]
    assert others
    assert not [file for file in others if any("lightning_spectral.models" in line for line in our_imports(file))]


def test_the_reference_lists_every_model() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert not [name for name in models.__all__ if f":: lightning_spectral.models.{name}\n" not in reference]
