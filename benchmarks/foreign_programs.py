"""Fifteen programs of other packages: two rounds each with plain Lightning, FedAvg and SpectralSharding.

``python benchmarks/foreign_programs.py [NAME ...]`` takes a minute, on random data, and downloads nothing. It prints OK
if the program trained, its weights are finite and have changed, or the first line of the error, such as that of a
package that is not there: timm, torchvision, monai, pytorch-forecasting, segmentation-models-pytorch, lightly,
vector-quantize-pytorch, ema-pytorch, schedulefree, torchdiffeq, torch-optimizer, transformers and peft.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: all weights are random
# The registry's torchvision has no operators for a CPU-only torch, and cannot be imported unless they are declared
TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import lightning.pytorch as pl  # noqa: E402  # imports torchvision

import lightning_spectral as ls  # noqa: E402

NUM_CLIENTS, BATCH_SIZE = 4, 8
Made = tuple[pl.LightningModule, Any, dict[str, Any]]  # the module, its examples, further options of the data module
PROGRAMS: dict[str, Callable[[], Made]] = {}


def program(make: Callable[[], Made]) -> Callable[[], Made]:
    PROGRAMS[make.__name__] = make
    return make


def images(size: int = 16, channels: int = 3, number: int = 64) -> TensorDataset:
    return TensorDataset(torch.randn(number, channels, size, size), torch.randint(4, (number,)))


def vectors(number: int = 64) -> TensorDataset:
    return TensorDataset(torch.randn(number, 8), torch.randint(4, (number,)))


def tokens(number: int = 64) -> TensorDataset:
    return TensorDataset(torch.randint(40, (number, 12)))


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, two in itertools.pairwise(sizes):
        layers += [nn.Linear(one, two), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@program
def lightning_demo() -> Made:
    from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel

    class Lit(ManualOptimBoringModel):
        train_dataloader = pl.LightningModule.train_dataloader  # the data are clients'
        val_dataloader = pl.LightningModule.val_dataloader
        test_dataloader = pl.LightningModule.test_dataloader
        predict_dataloader = pl.LightningModule.predict_dataloader

        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(32, 32, 32, 2)  # one layer alone would be both the first and the last, and stay whole

    return Lit(), torch.randn(64, 32), {}


@program
def bolts_gan() -> Made:
    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.generator = nn.Sequential(mlp(16, 64, 64), nn.ReLU(), nn.Linear(64, 16 * 16), nn.Tanh())
            self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.LeakyReLU(0.2), mlp(64, 64, 1))
            self.validation_z = torch.randn(8, 16)

        def training_step(self, batch: Any) -> None:
            imgs, _ = batch
            optimizer_g, optimizer_d = self.optimizers()  # type: ignore[misc]
            z = torch.randn(imgs.shape[0], 16).type_as(imgs)
            valid, fake = torch.ones(len(imgs), 1), torch.zeros(len(imgs), 1)
            bce = nn.functional.binary_cross_entropy_with_logits
            self.toggle_optimizer(optimizer_g)
            self.generated_imgs = self.generator(z)
            g_loss = bce(self.discriminator(self.generated_imgs), valid)
            self.log("g_loss", g_loss, prog_bar=True)
            self.manual_backward(g_loss)
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)
            self.toggle_optimizer(optimizer_d)
            real = bce(self.discriminator(imgs), valid)
            d_loss = (real + bce(self.discriminator(self.generator(z).detach()), fake)) / 2
            self.log("d_loss", d_loss, prog_bar=True)
            self.manual_backward(d_loss)
            optimizer_d.step()
            optimizer_d.zero_grad()
            self.untoggle_optimizer(optimizer_d)

        def configure_optimizers(self) -> Any:
            parts = self.generator, self.discriminator
            return [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts], []

    return Lit(), images(16, channels=1), {}


@program
def timm_lookahead() -> Made:
    import timm
    import timm.optim
    from timm.data.mixup import Mixup
    from timm.loss import SoftTargetCrossEntropy

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.create_model("resnet10t", num_classes=4, pretrained=False)
            self.mixup, self.loss = Mixup(mixup_alpha=0.8, num_classes=4), SoftTargetCrossEntropy()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = self.mixup(*batch)
            return self.loss(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return timm.optim.create_optimizer_v2(self, opt="lookahead_sgd", lr=0.05, momentum=0.9, weight_decay=0.0)

    return Lit(), images(32), {}


@program
def gpt2_accumulating() -> Made:
    import transformers

    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
            self.model = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            (ids,) = batch
            optimizer: Any = self.optimizers()
            loss = self.model(input_ids=ids, labels=ids).loss / 2
            self.manual_backward(loss)
            if (batch_idx + 1) % 2 == 0:
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                schedule: Any = self.lr_schedulers()
                schedule.step()
            self.log("perplexity", math.exp(2 * float(loss.detach())))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)
            schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 100)
            optimizer.step()  # so that the first rate is not 0
            schedule.step()
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Lit(), tokens(), {}


@program
def peft_warmup() -> Made:
    import peft
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16, num_labels=2)
            lora = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
            self.model = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (ids,) = batch
            return self.model(input_ids=ids, labels=(ids[:, 0] > 20).long()).loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (batch_idx + 1) / 4)
            optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)

    return Lit(), tokens(), {}


@program
def many_metrics() -> Made:
    import torchmetrics
    from torchmetrics import classification

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(8, 32, 32, 4)
            options = {"num_classes": 4}
            metrics = {
                "acc": classification.MulticlassAccuracy(**options),
                "f1": classification.MulticlassF1Score(**options),
                "auroc": classification.MulticlassAUROC(**options),
            }
            self.train_metrics = torchmetrics.MetricCollection(metrics, prefix="train/")
            self.confusion = classification.MulticlassConfusionMatrix(**options)
            self.running = torchmetrics.aggregation.RunningMean(window=3)
            self.tracker = torchmetrics.MetricTracker(classification.MulticlassAccuracy(**options))
            self.boot = torchmetrics.wrappers.BootStrapper(torchmetrics.MeanSquaredError(), num_bootstraps=3)
            self.seen: Counter[int] = Counter()

        def on_train_epoch_start(self) -> None:
            self.tracker.increment()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.net(x)
            loss = nn.functional.cross_entropy(logits, y)
            self.log_dict(self.train_metrics(logits.softmax(1), y))
            self.confusion.update(logits, y)
            self.tracker.update(logits, y)
            self.running(loss.detach())
            self.boot.update(logits.softmax(1)[:, 0], (y == 0).float())
            self.seen.update(y.tolist())
            self.log("running", self.running)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("diagonal", self.confusion.compute().diagonal().float().mean())
            self.confusion.reset()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Lit(), vectors(), {}


@program
def monai_unet() -> Made:
    from monai.losses import DiceCELoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = UNet(2, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
            self.loss, self.dice = DiceCELoss(to_onehot_y=True, softmax=True), DiceMetric(include_background=False)
            self.best_val_dice, self.metric_values = 0.0, [0.0]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            out = self.model(x)
            self.dice((out.argmax(1, keepdim=True)).float(), (x > 0).float())
            return self.loss(out, (x > 0).float())

        def on_train_epoch_end(self) -> None:
            self.metric_values.append(float(self.dice.aggregate()))
            self.dice.reset()

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    return Lit(), images(16, channels=1), {}


@program
def forecasting_nbeats() -> Made:
    import pandas as pd
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    hours = np.tile(np.arange(30), 8)
    table = pd.DataFrame({"group": np.repeat(np.arange(8), 30).astype(str), "hour": hours, "load": np.cos(hours) + 2.0})
    lengths = {"max_encoder_length": 12, "max_prediction_length": 4, "time_varying_unknown_reals": ["load"]}
    data = TimeSeriesDataSet(table, time_idx="hour", target="load", group_ids=["group"], **lengths)
    module = NBeats.from_dataset(data, learning_rate=1e-2, optimizer="sgd", widths=[16, 16], log_interval=-1)
    return module, data, {"collate_fn": data._collate_fn}


@program
def smp_unet() -> Made:
    import segmentation_models_pytorch as smp

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = smp.create_model("unet", encoder_name="resnet18", encoder_weights=None, classes=1)
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
            self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.training_step_outputs: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            image = batch[0]
            mask = (image[:, :1] > 0).float()
            logits = self.model((image - self.mean) / self.std)
            found = (logits.sigmoid() > 0.5).long()
            tp, fp, fn, tn = smp.metrics.get_stats(found, mask.long(), mode="binary")
            outputs = {"loss": self.loss_fn(logits, mask), "tp": tp, "fp": fp, "fn": fn, "tn": tn}
            self.training_step_outputs.append(outputs)
            return outputs

        def on_train_epoch_end(self) -> None:
            counts = [torch.cat([one[key] for one in self.training_step_outputs]) for key in ("tp", "fp", "fn", "tn")]
            self.log("iou", smp.metrics.iou_score(*counts, reduction="micro"))
            self.training_step_outputs.clear()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Lit(), images(32), {}


@program
def lightly_moco() -> Made:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Flatten(), mlp(3 * 64, 32, 32))
            self.projection_head = MoCoProjectionHead(32, 32, 16)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NTXentLoss(memory_bank_size=(32, 16))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.backbone_momentum, m=momentum)
            update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
            x, _ = batch
            query = self.projection_head(self.backbone(x + 0.1 * torch.randn_like(x)))
            with torch.no_grad():
                key = self.projection_head_momentum(self.backbone_momentum(x))
            return self.criterion(query, key)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    return Lit(), images(8), {}


@program
def lightly_dino() -> Made:
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.student_backbone = nn.Sequential(nn.Flatten(), mlp(3 * 64, 32, 32))
            self.student_head = DINOProjectionHead(32, 32, 16, 24, freeze_last_layer=1)
            self.teacher_backbone = copy.deepcopy(self.student_backbone)
            self.teacher_head = DINOProjectionHead(32, 32, 16, 24)
            deactivate_requires_grad(self.teacher_backbone)
            deactivate_requires_grad(self.teacher_head)
            self.criterion = DINOLoss(output_dim=24, warmup_teacher_temp_epochs=5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_momentum(self.student_backbone, self.teacher_backbone, m=0.99)
            update_momentum(self.student_head, self.teacher_head, m=0.99)
            views = [batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(3)]
            with torch.no_grad():
                teacher = [self.teacher_head(self.teacher_backbone(view)) for view in views[:2]]
            student = [self.student_head(self.student_backbone(view)) for view in views]
            return self.criterion(teacher, student, epoch=self.current_epoch)

        def on_after_backward(self) -> None:
            self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return torch.optim.Adam(trained, lr=1e-3)

    return Lit(), images(8), {}


@program
def vq_vae_with_ema() -> Made:
    from ema_pytorch import EMA
    from vector_quantize_pytorch import VectorQuantize

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 32, 32, 16), mlp(16, 32, 32, 8)
            self.vq = VectorQuantize(dim=16, codebook_size=12, decay=0.8, commitment_weight=1.0)
            self.ema = EMA(self.decoder, beta=0.9, update_every=1, update_after_step=0)
            self.ema.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            quantized, indices, commit = self.vq(self.encoder(x)[:, None])
            self.log("codes", float(len(indices.unique())))
            return nn.functional.mse_loss(self.decoder(quantized[:, 0]), x) + commit.sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.ema.update()

        def configure_optimizers(self) -> Any:
            parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
            return torch.optim.Adam(parameters, lr=1e-3)

    return Lit(), vectors(), {}


@program
def schedule_free() -> Made:
    import schedulefree

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(8, 32, 32, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def on_train_epoch_start(self) -> None:
            self.optimizers().optimizer.train()  # type: ignore[union-attr]

        def on_train_epoch_end(self) -> None:
            self.optimizers().optimizer.eval()  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.01, warmup_steps=2)

    return Lit(), vectors(), {}


@program
def scripted_neural_ode() -> Made:
    import torch_optimizer
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x)))

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.head = torch.jit.script(Field()), mlp(8, 32, 32, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            times = torch.tensor([0.0, 1.0])
            end = odeint_adjoint(self.field, x, times, method="euler", adjoint_params=tuple(self.field.parameters()))
            return nn.functional.cross_entropy(self.head(end[-1]), y)

        def configure_optimizers(self) -> Any:
            return torch_optimizer.Lookahead(torch.optim.SGD(self.parameters(), lr=0.1), k=2)

    return Lit(), vectors(), {}


class Replay:
    """A buffer of a user's own class."""

    def __init__(self) -> None:
        self.buffer: deque[tuple[Tensor, Tensor]] = deque(maxlen=50)
        self.rng = np.random.default_rng(0)

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        chosen = [self.buffer[i] for i in self.rng.integers(len(self.buffer), size=size)]
        x, y = zip(*chosen, strict=True)
        return torch.stack(x), torch.stack(y)


AGENT: dict[str, Any] = {}


@program
def dqn_with_replay() -> Made:
    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.target_net = mlp(8, 32, 32, 4), mlp(8, 32, 32, 4).requires_grad_(False)
            self.replay, self.total_reward, self.epsilon = Replay(), 0.0, 1.0
            self.net[2].weight.register_hook(lambda grad: grad * AGENT["lit"].epsilon)
            AGENT["lit"] = self

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.replay.buffer.extend(zip(*batch, strict=True))
            self.epsilon = max(0.01, self.epsilon * 0.9)
            if batch_idx % 2 == 0:
                self.target_net.load_state_dict(self.net.state_dict())
            x, actions = self.replay.sample(8)
            values = self.net(x).gather(1, actions[:, None])[:, 0]
            with torch.no_grad():
                wanted = 0.9 * self.target_net(x.flip(0)).max(1).values + x.mean(1)
            self.total_reward += float(wanted.mean())
            self.log("total_reward", self.total_reward)
            return nn.functional.mse_loss(values, wanted)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=1e-3)

    return Lit(), vectors(), {}


# Running them

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}


def train(make: Callable[[], Made], algorithm: Any) -> str:
    """OK, or the first line of the error."""
    try:
        torch.manual_seed(0)
        np.random.seed(0)
        module, examples, options = make()
        start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        trainer = pl.Trainer(**QUIET)
        if algorithm is None:
            trainer.fit(module, DataLoader(examples, batch_size=BATCH_SIZE, **options))
        else:
            partitioner = ls.IIDPartitioner(num_clients=NUM_CLIENTS)
            data = ls.FederatedDataModule(examples, partitioner, batch_size=BATCH_SIZE, drop_last=True, **options)
            trainer.fit(ls.FederatedModule(module, algorithm=algorithm, clients_per_round=3), data)
        changed = [name for name, parameter in module.named_parameters() if not torch.equal(parameter, start[name])]
        if not changed:
            return "runs, but nothing has changed"
        if not all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters()):
            return "weights are not finite"
        return "OK"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        first = " ".join(lines[:2]) if lines[0].endswith("as it is:") else lines[0]
        return f"{type(error).__name__}: {first}"


def main() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    algorithms = {"plain": None, "FedAvg": ls.FedAvg(), "SpectralSharding": ls.SpectralSharding(keep_ratio=0.5)}
    failed = 0
    for name in sys.argv[1:] or PROGRAMS:
        for title, algorithm in algorithms.items():
            began = time.perf_counter()
            verdict = train(PROGRAMS[name], algorithm)
            failed += verdict != "OK"
            print(f"{name:20s} {title:17s} {time.perf_counter() - began:5.1f} s  {verdict[:230]}", flush=True)
    print(f"{failed} of {3 * len(sys.argv[1:] or PROGRAMS)} failed")


if __name__ == "__main__":
    main()
