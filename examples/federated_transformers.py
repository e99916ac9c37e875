"""A BERT of transformers, trained with LoRA: is a line of Python's library from `tarfile` or from `statistics`?

    python examples/federated_transformers.py

Half of the clients hold adapters of rank 2, the others of rank 8; embeddings and head are new here and trained whole.
For real use, begin with ``BertForSequenceClassification.from_pretrained(...)`` and its tokenizer.
"""

import argparse
import inspect
import statistics
import tarfile

import lightning.pytorch as pl
import torch
from torch.utils.data import TensorDataset, random_split
from transformers import BertConfig, BertForSequenceClassification

import lightning_spectral as ls

LENGTH = 32  # bytes


class LitBert(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        self.net = BertForSequenceClassification(BertConfig(vocab_size=128, max_position_embeddings=LENGTH, **sizes))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.net(batch[0], attention_mask=batch[0] > 0, labels=batch[1]).loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        right = self.net(batch[0], attention_mask=batch[0] > 0).logits.argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def examples() -> TensorDataset:
    """The lines of both modules as bytes, and which one they are from."""
    sources = [inspect.getsource(module).splitlines() for module in (statistics, tarfile)]
    lines = [(line.strip(), label) for label, source in enumerate(sources) for line in source if len(line.strip()) > 15]
    tokens = [list(line.encode("ascii", "replace")[:LENGTH].ljust(LENGTH, b"\0")) for line, _ in lines]
    return TensorDataset(torch.tensor(tokens), torch.tensor([label for _, label in lines]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    pl.seed_everything(0, verbose=False)
    train, val = random_split(examples(), [0.8, 0.2])
    algorithm = ls.LoRA(rank={2: 0.5, 8: 0.5}, train=["*embeddings*", "*pooler*", "*classifier*"])
    model = ls.FederatedModule(LitBert(), algorithm=algorithm, clients_per_round=5, local_epochs=2)
    data = ls.FederatedDataModule(train, ls.DirichletPartitioner(num_clients=20, alpha=2.0), val=val, batch_size=16)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=rounds, callbacks=[ls.RoundProgressBar()], **quiet)
    trainer.fit(model, data)
    print(f"{trainer.callback_metrics['accuracy']:.1%} of the other lines")


if __name__ == "__main__":
    main()
