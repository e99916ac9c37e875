"""Fine-tune a small GPT-2, pre-trained on Shakespeare's comedies, on forty speakers of the other plays with LoRA.

    python examples/lora_shakespeare.py

Clients are speakers; half of them hold adapters of rank 2, the others of rank 8. Pre-training takes 40 seconds on one
CPU core, and its result is saved. Fine-tuning takes 20 seconds, and the perplexity per character falls from 7.55 to
7.16. `outputs/lora_shakespeare/` then contains the network and the adapter for PEFT. Needs transformers and PEFT, and
downloads the plays (2 MB) once.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import exp
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

sys.path.append(str(Path(__file__).parents[1] / "studies"))  # has `plays`
from plays import SYMBOLS, shakespeare

import lightning_spectral as ls

COMEDIES = (
    "a-midsummer-night-s-dream",
    "as-you-like-it",
    "much-ado-about-nothing",
    "the-comedy-of-errors",
    "the-merchant-of-venice",
    "the-merry-wives-of-windsor",
    "the-taming-of-the-shrew",
    "twelfth-night",
)
LENGTH = 48  # context of the model, in characters
WIDTH, NUM_LAYERS, NUM_HEADS = 64, 2, 4
PRETRAINING_STEPS = 600  # of 32 sequences, with AdamW
NUM_CLIENTS = 40  # the speakers with the most text
NUM_TRAIN, NUM_TEST = 40, 10  # sequences per speaker
RANK = {2: 0.5, 8: 0.5}  # rank of the adapters: share of clients
CLIENTS_PER_ROUND = 6
BATCH_SIZE = 8  # so a client takes five local steps
LEARNING_RATE = 3e-3  # of the clients' AdamW
NUM_ROUNDS = 20


class LitGPT2(pl.LightningModule):
    """An ordinary LightningModule around the GPT-2 of transformers, on characters."""

    def __init__(self, net: GPT2LMHeadModel, learning_rate: float) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        tokens, next_tokens = batch
        return torch.nn.functional.cross_entropy(self.net(tokens).logits.flatten(0, 1), next_tokens.flatten())

    def validation_step(self, batch: Sequence[Tensor]) -> None:
        self.log("val_loss", self.training_step(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def small_gpt2() -> GPT2LMHeadModel:
    size = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": NUM_HEADS}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(SYMBOLS), bos_token_id=0, eos_token_id=0, **size, **dropout))


def windows(text: str) -> Tensor:
    """Return codes of the characters, shape ``(n, LENGTH + 1)``; the last of a window is the first of the next."""
    codes = torch.tensor([SYMBOLS.index(symbol) for symbol in text])
    return codes.unfold(0, LENGTH + 1, LENGTH)


def next_characters(sequences: Tensor) -> TensorDataset:
    return TensorDataset(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())


def pretrained(folder: Path, num_steps: int) -> GPT2LMHeadModel:
    """Return the network after ordinary training on the comedies, loaded from the folder if it is already there."""
    path = folder / f"comedies_{num_steps}"
    if not path.exists():
        torch.manual_seed(0)
        module = LitGPT2(small_gpt2(), learning_rate=2e-3)
        text = "".join(said for (play, _), said in shakespeare().items() if play in COMEDIES)
        data = DataLoader(next_characters(windows(text)), batch_size=32, shuffle=True, drop_last=True)
        with without_validation():
            trainer(max_steps=num_steps).fit(module, data)
        module.net.save_pretrained(path)
    return GPT2LMHeadModel.from_pretrained(path).train()


def deal_speakers(seed: int) -> ls.FederatedDataModule:
    """Deal each speaker their own text: the beginning for training, the next part for testing."""
    says = {speaker: text for speaker, text in shakespeare().items() if speaker[0] not in COMEDIES}
    most = sorted(says, key=lambda speaker: len(says[speaker]), reverse=True)[:NUM_CLIENTS]
    parts = {speaker: windows(says[speaker])[: NUM_TRAIN + NUM_TEST] for speaker in most}
    train = torch.cat([part[:NUM_TRAIN] for part in parts.values()])
    speakers = [speaker for speaker, part in parts.items() for _ in part[:NUM_TRAIN]]
    return ls.FederatedDataModule(
        next_characters(train),
        ls.NaturalPartitioner(speakers),
        val=next_characters(torch.cat([part[NUM_TRAIN:] for part in parts.values()])),
        batch_size=BATCH_SIZE,
        seed=seed,
    )


def fine_tune(
    algorithm: ls.Algorithm, module: LitGPT2, num_rounds: int, seed: int
) -> tuple[ls.FederatedModule, dict[str, list[float]]]:
    """Train on the speakers; also return perplexity and megabytes so far, before the first and after each round."""
    model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=CLIENTS_PER_ROUND, seed=seed)
    losses, sent = fitted(model, deal_speakers(seed), num_rounds, "val_loss")
    return model, {"perplexity": [exp(loss) for loss in losses], **sent}


def fitted(
    model: ls.FederatedModule, data: ls.FederatedDataModule, num_rounds: int, figure: str
) -> tuple[list[float], dict[str, list[float]]]:
    """Fit; return a validation metric and the megabytes so far, both before the first round and after each."""
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    quiet = trainer(max_epochs=num_rounds, callbacks=[history, ledger])
    (start,) = quiet.validate(model, data, verbose=False)
    quiet.fit(model, data)
    return [start[figure], *history.column(figure)], megabytes(ledger, num_rounds)


def megabytes(ledger: ls.CommunicationLedger, num_rounds: int) -> dict[str, list[float]]:
    """Return the megabytes sent up to each round, in both directions, and how many of them are the frozen base."""
    rows = [[row for row in ledger.rows if row.round_idx < end] for end in range(num_rounds + 1)]
    return {
        "megabytes": [sum(row.downlink_bytes + row.uplink_bytes for row in before) / 1e6 for before in rows],
        "of it base": [sum(row.frozen_bytes for row in before) / 1e6 for before in rows],
    }


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )


@contextmanager
def without_validation() -> Iterator[None]:
    """Silence Lightning's warnings about an ordinary fit with one data loader."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(many workers|no `val_dataloader`)")
        yield


def quiet_lightning() -> None:
    """Silence banners and bars, and the warning that Lightning 2.6 triggers in torch 2.13 (Lightning issue 21326)."""
    disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA with mixed ranks: a small GPT-2 on Shakespeare's speakers.")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="communication rounds (%(default)s)")
    parser.add_argument("--steps", type=int, default=PRETRAINING_STEPS, help="pre-training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of fine-tuning (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/lora_shakespeare"), help="folder (%(default)s)")
    args = parser.parse_args()
    quiet_lightning()
    torch.set_num_threads(1)  # more threads hardly help on a model this small, and hurt on a busy machine
    module = LitGPT2(pretrained(args.output, args.steps), LEARNING_RATE)
    model, curves = fine_tune(ls.LoRA(RANK), module, args.rounds, args.seed)
    first, last = curves["perplexity"][0], curves["perplexity"][-1]
    sent, base = curves["megabytes"][-1], curves["of it base"][-1]
    print(f"perplexity {first:.3f} before and {last:.3f} after {args.rounds} rounds")
    print(f"{sent:.1f} MB, including {base:.1f} MB for the base, which is sent to a client only once")
    ls.algorithms.save_peft_adapter(model, args.output / "adapter", submodule="net")
    print(f"adapter for PEFT written to {args.output / 'adapter'}")


if __name__ == "__main__":
    main()
