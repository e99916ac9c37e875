"""Thirteen programs of other packages: FedAvg with one client of all data against plain Lightning, bit for bit.

``python benchmarks/one_client.py [NAME ...]`` takes a minute, on random data, and downloads nothing. Both train one
epoch on the same batches, with the same draws; where a program's step looks at its trainer, both show it the same. It
prints whether all weights and buffers are equal to the last bit, or by how much they differ, or the first line of an
error, such as that of a package that is not there: schedulefree, pytorch-metric-learning, torch-geometric,
pytorch-optimizer, rotary-embedding-torch, entmax, snntorch, gpytorch, pytorch-tabnet, nflows, e3nn, torchdiffeq,
torchsde.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import lightning_spectral as ls
from lightning_spectral.protocol.records import Download, WorkUnit
from lightning_spectral.protocol.rng import GlobalGenerators, derived_seed

Made = tuple[pl.LightningModule, Any, dict[str, Any]]  # the module, its examples, further options of the data module
PROGRAMS: dict[str, Callable[[], Made]] = {}
BATCH_SIZE = 8


def program(make: Callable[[], Made]) -> Callable[[], Made]:
    PROGRAMS[make.__name__] = make
    return make


class Lit(pl.LightningModule):
    """A network, and a step that a program overrides."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def vectors(number: int = 60) -> TensorDataset:
    return TensorDataset(torch.randn(number, 8), torch.randint(4, (number,)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


@program
def schedule_free() -> Made:
    import schedulefree

    class Free(Lit):
        def configure_optimizers(self) -> Any:
            return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2, warmup_steps=3)

        def on_train_epoch_start(self) -> None:
            self.optimizers().train()  # type: ignore[union-attr]

        def on_train_end(self) -> None:
            self.optimizers().eval()  # type: ignore[union-attr]

    return Free(mlp()), vectors(), {}


@program
def metric_learning() -> Made:
    from pytorch_metric_learning import losses, miners

    class Embeds(Lit):
        def __init__(self) -> None:
            super().__init__(mlp())
            self.miner, self.triplets = miners.TripletMarginMiner(margin=0.2), losses.TripletMarginLoss()
            self.proxies = losses.ProxyAnchorLoss(num_classes=4, embedding_size=4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            found = self.net(x)
            everywhere = self.all_gather(found, sync_grads=True)
            return self.triplets(everywhere, y, self.miner(everywhere, y)) + self.proxies(everywhere, y)

    return Embeds(), vectors(), {}


@program
def graphs() -> Made:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(Lit):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([GCNConv(5, 16), GCNConv(16, 16)]))
            self.head = nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch.x
            for layer in self.net:  # type: ignore[attr-defined]
                x = torch.relu(layer(x, batch.edge_index))
            return nn.functional.cross_entropy(self.head(global_mean_pool(x, batch.batch)), batch.y)

    sizes = torch.randint(4, 9, (60,)).tolist()
    examples = [
        Data(x=torch.randn(n, 5), edge_index=torch.randint(n, (2, 3 * n)), y=torch.randint(4, (1,))) for n in sizes
    ]
    return Graphs(), examples, {"collate_fn": Batch.from_data_list}


@program
def sharpness_aware() -> Made:
    from pytorch_optimizer import SAM

    class Sharp(Lit):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            optimizer: Any = self.optimizers()
            for step in ("first_step", "second_step"):
                self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
                getattr(optimizer, step)(zero_grad=True)
            if self.trainer.is_last_batch:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.1

        def configure_optimizers(self) -> Any:
            return SAM(self.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    return Sharp(mlp()), vectors(), {}


@program
def rotary_attention() -> Made:
    from rotary_embedding_torch import RotaryEmbedding

    class Rotary(Lit):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 48))
            self.embed, self.rotary, self.head = nn.Embedding(20, 16), RotaryEmbedding(dim=8), nn.Linear(16, 20)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (ids,) = batch
            q, k, v = self.net(self.embed(ids)).chunk(3, dim=-1)
            q, k = (self.rotary.rotate_queries_or_keys(t) for t in (q, k))
            found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return nn.functional.cross_entropy(self.head(found)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Rotary(), TensorDataset(torch.randint(20, (60, 12))), {}


@program
def sparse_attention() -> Made:
    from entmax import Entmax15Loss, sparsemax

    class Sparse(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self.net(x)
            self.log("support", (sparsemax(logits, dim=-1) > 0).float().sum(1).mean())
            return Entmax15Loss()(logits, y)

    return Sparse(mlp()), vectors(), {}


@program
def spiking() -> Made:
    import snntorch
    from snntorch import surrogate

    class Spikes(Lit):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 24))
            self.spikes = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(), learn_beta=True)
            self.head = nn.Linear(24, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            memory, rates = self.spikes.init_leaky(), torch.zeros(len(x), 24)
            for _ in range(5):
                spikes, memory = self.spikes(self.net(x), memory)
                rates = rates + spikes
            return nn.functional.cross_entropy(self.head(rates), y)

    return Spikes(), vectors(), {}


@program
def gaussian_process() -> Made:
    import gpytorch
    from gpytorch import variational

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self, inducing: Tensor) -> None:
            posterior = variational.CholeskyVariationalDistribution(len(inducing))
            super().__init__(variational.VariationalStrategy(self, inducing, posterior, learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Lit2(Lit):
        def __init__(self) -> None:
            super().__init__(Process(torch.randn(6, 8)))
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            num_data = len(self.trainer.train_dataloader.dataset)
            return -gpytorch.mlls.VariationalELBO(self.likelihood, self.net, num_data=num_data)(self.net(x), y.float())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Lit2(), vectors(), {}


@program
def tabular() -> Made:
    from pytorch_tabnet.tab_network import TabNet

    class Table(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits, sparsity = self.net(x)
            return nn.functional.cross_entropy(logits, y) - 1e-3 * sparsity

    net = TabNet(8, 4, n_d=4, n_a=4, n_steps=2, group_attention_matrix=torch.eye(8), virtual_batch_size=4)
    return Table(net), vectors(64), {}


@program
def flows() -> Made:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation

    class Flows(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return -self.net.log_prob(batch[0]).mean()  # type: ignore[operator]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    parts = [MaskedAffineAutoregressiveTransform(8, 16) if i % 2 else ReversePermutation(8) for i in range(4)]
    return Flows(Flow(CompositeTransform(parts), StandardNormal([8]))), vectors(), {}


@program
def equivariant() -> Made:
    from e3nn import o3

    class Equivariant(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return 1e-2 * (self.net(x[:, :4]).square().sum(1) - y).square().mean()

    return Equivariant(o3.Linear("1x0e + 1x1o", "3x0e + 2x1o")), vectors(), {}


@program
def neural_sde() -> Made:
    import torchsde

    class Equation(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 0.1))

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.drift(y))

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return self.spread.expand_as(y)

    class Stochastic(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torchsde.sdeint(self.net, batch[0], torch.linspace(0, 1, 3), dt=0.2)[-1].square().mean()

    return Stochastic(Equation()), vectors(), {}


@program
def physics_informed() -> Made:
    class Physics(Lit):
        """Solves u'' = -u by its residual, with a weight that grows over the epoch's batches."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].requires_grad_()
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            weight = (batch_idx + 1) / self.trainer.num_training_batches
            return weight * (bend + u).square().mean() + (self.net(torch.zeros(1, 1)) - 1).square().mean()

    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return Physics(net), TensorDataset(3 * torch.rand(60, 1)), {}


class TheirOrder(IterableDataset[Any]):
    """The batches of the only client's first turn, with as many of them as the client sees."""

    def __init__(self, data: ls.FederatedDataModule, download: Download) -> None:
        self.data, self.download, self.dataset = data, download, data.train

    def __len__(self) -> int:
        return self.data.client_data(self.download).num_batches

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _ in self.data.client_data(self.download).epoch(0))


class Seeds(pl.Callback):
    """Seeds the global generators as those of the client's turn are."""

    def __init__(self, download: Download) -> None:
        self.seed = derived_seed(download.seed, "local training", *download.ids)

    def on_train_epoch_start(self, *args: Any) -> None:
        GlobalGenerators([torch.device("cpu")]).seed(self.seed)


class Uploaded(ls.RoundCallback):
    """What the client sends back: the server's weights are its mean with nobody, which rounds once more."""

    def on_client_end(self, trainer: Any, pl_module: Any, turn: Any) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in turn.upload.tensors.items()}


def compared(name: str) -> str:
    """Train both ways; return what differs."""
    torch.manual_seed(0)
    module, examples, options = PROGRAMS[name]()
    plain = copy.deepcopy(module)
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(1), batch_size=BATCH_SIZE, **options)
    download = Download(WorkUnit(0), 1.0, {}, round_idx=0, seed=0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[Seeds(download)], **quiet).fit(
        plain, TheirOrder(data, download)
    )
    before = {key: value.clone() for key, value in module.state_dict().items()}
    model, uploaded = ls.FederatedModule(module, clients_per_round=1), Uploaded()
    pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[uploaded], **quiet).fit(model, data)
    ours, theirs = uploaded.tensors, plain.state_dict()
    changed = sum(not torch.equal(value, before[key]) for key, value in ours.items())
    other = [key for key, value in ours.items() if not torch.equal(value, theirs[key])]
    if not other:
        return f"{changed} of {len(ours)} tensors have changed, to equal bits"
    most = max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in other)
    return f"{len(other)} of {len(ours)} tensors differ, by up to {most:.1e}: {', '.join(other)}"


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PROGRAMS:
        try:
            print(f"{name}: {compared(name)}", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
