"""Another app of `test_loopback`: three models of other packages, each with its own algorithm, on the same devices."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from loopback_app import CLIENTS, gathered, trainer, weights_after
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
import lightning_spectral.network as net

EACH = 24  # examples of a client


class LitLogits(pl.LightningModule):
    """Any model that gives logits, of examples or of each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, x: Any) -> Any:
        found = self.net(x)
        return found if isinstance(found, torch.Tensor) else found.logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gpt2() -> pl.LightningModule:
    """A GPT-2 of transformers: its output layer is its embedding, and three layers are packed into one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return LitLogits(GPT2LMHeadModel(GPT2Config(vocab_size=20, resid_pdrop=0.0, **sizes)))


def bert() -> pl.LightningModule:
    """A BERT of transformers, to be trained with adapters."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return LitLogits(BertForSequenceClassification(BertConfig(vocab_size=20, **sizes)))


def densenet() -> pl.LightningModule:
    """A DenseNet of MONAI, with BatchNorm."""
    from monai.networks.nets import DenseNet

    torch.manual_seed(2)
    return LitLogits(DenseNet(2, 1, 3, init_features=8, growth_rate=8, block_config=(2, 2)))


MODULES = {"gpt2": gpt2, "bert": bert, "densenet": densenet}
ALGORITHMS = {
    "gpt2": ls.SpectralSharding(keep_ratio=[0.2, 0.5, 0.2], layers=ls.nn.LayerChoices(split={"*.c_attn": 3})),
    "bert": ls.LoRA(2, train=["*embeddings*", "*pooler*", "*classifier*"]),
    "densenet": ls.SpectralSharding(ls.Unbiased(), keep_ratio=[0.3, 0.6, 0.3]),
}


def examples(name: str, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(20, (EACH, 9), generator=generator)
    if name == "gpt2":
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    if name == "bert":
        return TensorDataset(tokens, tokens[:, 0] % 2)
    return TensorDataset(torch.randn(EACH, 1, 16, 16, generator=generator), tokens[:, 0] % 3)


def federation(config: Any) -> ls.MultiModelModule:
    models = {name: ls.FederatedModule(MODULES[name](), algorithm=ALGORITHMS[name], seed=1) for name in MODULES}
    return ls.MultiModelModule(models, participation=ls.FullParticipation(), seed=3)


def client(config: Any) -> Any:
    return {name: net.ClientData(examples(name, 1 + int(config["client"])), batch_size=8) for name in MODULES}


def held_out(config: Any) -> Any:
    return {name: examples(name, 1000) for name in MODULES}


def simulated(config: Any) -> dict[str, torch.Tensor]:
    """The weights that the same federation has after its rounds in a simulation."""
    data = {name: gathered(partial(examples, name), batch_size=8) for name in MODULES}
    return weights_after(config, federation(config), ls.MultiModelDataModule(data))


server = net.server_app(federation, trainer, val=held_out, wait_for=CLIENTS, patience=300)
