"""A damaged checkpoint is refused by name: nothing in it runs, and no other weights come back."""

from __future__ import annotations

import inspect
import io
import random
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.plugin.checkpoint_files import check_loadable

WEIGHTS = {"w": torch.arange(5.0), "b": torch.ones(3, dtype=torch.bfloat16)}
PROGRESS = {"epoch": 1, "global_step": 2, "loops": {}, "optimizer_states": []}
CHECKPOINT = {
    **PROGRESS,
    "state_dict": WEIGHTS,
    "federation": {},
    "pytorch-lightning_version": pl.__version__,
}


class LitWeights(pl.LightningModule):
    """A user's module of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in WEIGHTS.items():
            self.register_buffer(name, torch.zeros_like(value))


class Writes(nn.Module):
    """A module that writes a file when TorchScript loads it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.w = path, torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, Tensor, bool]:
        return self.path, self.w, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, Tensor, bool]) -> None:
        self.path, self.w, self.training = state
        torch.save(self.w, self.path)


class Call:
    """An object whose pickle is a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small checkpoint of a federation."""
    ls.plugin.AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path := tmp_path / "last.ckpt")
    return path


def mark_as_folder(path: Path) -> None:
    """Torch takes uninitialised memory for the content of a folder."""
    content = bytearray(path.read_bytes())
    directory = content.index(b"PK\1\2", content.index(b"/data/1"))
    entry = content.rindex(b"PK\1\2", 0, content.index(b"/data/0", directory))
    content[entry + 38] ^= 0x10
    path.write_bytes(content)


class TestNothingRuns:
    @pytest.fixture
    def script(self, tmp_path: Path) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            torch.jit.script(Writes(str(tmp_path / "made"))).save(path := tmp_path / "epoch=9.ckpt")
        return path

    @pytest.fixture(autouse=True)
    def nothing_was_written(self, tmp_path: Path) -> Any:
        yield
        assert not (tmp_path / "made").exists()

    def test_of_torchscript_when_a_folder_is_searched(self, script: Path) -> None:
        with pytest.warns(ls.SpectralWarning, match=r"epoch=9.ckpt .* skipped: it is a TorchScript archive"):
            assert ls.latest_checkpoint(script.parent) is None

    def test_of_torchscript_when_a_module_is_loaded(self, script: Path, lit: Any) -> None:
        with pytest.raises(ValueError, match=r"epoch=9.ckpt .*: it is a TorchScript archive"):
            ls.plugin.load_user_module(script, type(lit), weights_only=False)
        with pytest.raises(ValueError, match=r"epoch=9.ckpt .*: it is a TorchScript archive"):
            ls.FederatedModule.load_from_checkpoint(script, module=lit)

    @pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
    def test_of_torchscript_when_a_fit_loads_it(
        self, stage: str, script: Path, lit: Any, data: Any, quiet: Any
    ) -> None:
        model = ls.FederatedModule(lit, clients_per_round=2)
        with pytest.raises(ValueError, match=r"epoch=9.ckpt .*: it is a TorchScript archive"):
            getattr(pl.Trainer(max_epochs=1, **quiet), stage)(model, data, ckpt_path=script)

    def test_of_a_pickle_when_a_file_is_checked(self, tmp_path: Path) -> None:
        torch.save({**PROGRESS, "own": Call(pytest.fail, "it was executed")}, path := tmp_path / "one.ckpt")
        check_loadable(path)
        for given in (path, tmp_path):
            with pytest.raises(ValueError, match=r"one.ckpt holds objects other than .* torch.serialization.add_safe_"):
                ls.latest_checkpoint(given)


class TestDamage:
    @pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
    @pytest.mark.filterwarnings("ignore:.*cannot be resumed from and is skipped")
    def test_a_damaged_file_is_refused_by_name_or_loads_what_was_saved(self, count: int, path: Path) -> None:
        whole, refused = path.read_bytes(), 0
        for seed in range(count):
            path.write_bytes(damaged(whole, random.Random(seed)))
            found = ls.latest_checkpoint(path.parent)
            if found is None:
                with pytest.raises(ValueError, match=r"last\.ckpt is empty or not a whole checkpoint"):
                    ls.plugin.load_user_module(path, LitWeights)
                refused += 1
            else:
                loaded = ls.plugin.load_user_module(path, LitWeights).state_dict()
                assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS), seed
        assert 0.7 * count < refused < count  # bits in padding do no harm

    def test_other_tensors_than_those_saved_are_refused(self, path: Path) -> None:
        mark_as_folder(path)
        message = r"last.ckpt .*its tensors are not those that were saved"
        with pytest.raises(ValueError, match=message):
            ls.plugin.load_user_module(path, LitWeights)
        with pytest.raises(ValueError, match=message):
            ls.plugin.AtomicCheckpointIO().load_checkpoint(path)
        with pytest.warns(ls.SpectralWarning, match=message):
            assert ls.latest_checkpoint(path.parent) is None

    @pytest.mark.parametrize(
        "other",
        [
            torch.arange(4.0).view(2, 2),  # the same bytes in another shape
            torch.arange(4.0).view(torch.int32),  # as another type
            torch.tensor([0.0, 1.0, 2.0, 4.0]),
            torch.tensor([-0.0, 1.0, 2.0, 3.0]),
        ],
    )
    def test_a_resumed_run_refuses_tensors_of_another_shape_type_or_value(self, other: Tensor, path: Path) -> None:
        saved = {"weights": [torch.arange(4.0)], "round": 3}
        ls.plugin.AtomicCheckpointIO().save_checkpoint(saved, path)
        changed = {**torch.load(path, weights_only=True), "weights": [other]}
        torch.save(changed, path)
        with pytest.raises(ValueError, match=r"last.ckpt .*: its tensors .* delete its 'federation_digest'"):
            ls.plugin.AtomicCheckpointIO().load_checkpoint(path)
        del changed["federation_digest"]
        torch.save(changed, path)
        assert torch.equal(ls.plugin.AtomicCheckpointIO().load_checkpoint(path)["weights"][0], other)

    def test_a_folder_in_place_of_a_file_is_refused(self, path: Path) -> None:
        with pytest.raises(ValueError, match=r"is a folder; latest_checkpoint\('.*'\) finds"):
            ls.plugin.load_user_module(path.parent, LitWeights)

    def test_an_opened_file_is_checked_and_loaded(self, path: Path) -> None:
        with path.open("rb") as file:
            assert torch.equal(ls.plugin.load_user_module(file, LitWeights).w, WEIGHTS["w"])
        with pytest.raises(ValueError, match=r"the given file is empty or not a whole checkpoint: BadZipFile"):
            ls.plugin.load_user_module(io.BytesIO(path.read_bytes()[:-40]), LitWeights)

    def test_a_resumed_run_refuses_a_damaged_weight(self, lit: Any, data: Any, fit: Fit, path: Path) -> None:
        fit(lit, data).trainer.save_checkpoint(path)
        content = bytearray(path.read_bytes())
        content[content.index(b"data/1FB") + 100] ^= 1  # within the padding before a weight, or the weight
        content[content.index(lit.state_dict()[next(iter(lit.state_dict()))].numpy().tobytes()) + 1] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"last.ckpt .*: the checksum of archive/data/\d+ does not match"):
            fit(lit, data, max_epochs=2, ckpt_path=path)


def saved_by_users() -> dict[str, Any]:
    """Whatever hyper-parameters and hooks may put into a checkpoint."""
    tagged = nn.Parameter(torch.ones(2))
    tagged.tag = "x"  # type: ignore[attr-defined]
    return {
        "module": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LazyLinear(2)),
        "parameter": tagged,
        "part of a storage": torch.arange(100.0).view(10, 10)[2:5, 3:8].T,
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.zeros(()),
        "nothing": torch.zeros(3, 0, 2),
        "new type": torch.ones(7, dtype=torch.uint16)[3:5],
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "storage": torch.ones(3).untyped_storage(),
        "types": [torch.float16, torch.device("cpu"), torch.Size([2]), int, len],
        "bytes": [b"abc", bytearray(b"abc"), bytearray()],
        "numpy": [np.arange(4), np.float64(3), np.random.default_rng(0)],
        "containers": [{1}, frozenset({2}), defaultdict(list, {1: [2]}), Counter("ab"), OrderedDict(a=1), range(3)],
        "objects": [Namespace(a=1), Path("x"), ValueError("x"), 3j, 10**50, None],
    }


def test_whatever_torch_saves_can_be_loaded(path: Path) -> None:
    ls.plugin.AtomicCheckpointIO().save_checkpoint(saved_by_users(), path)
    options = {"weights_only": False} if accepts_weights_only() else {}
    loaded = ls.plugin.AtomicCheckpointIO().load_checkpoint(path, **options)
    assert loaded.keys() - {"federation_digest"} == saved_by_users().keys()


def accepts_weights_only() -> bool:
    return "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters  # since Lightning 2.6


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """The file with a flipped bit, an overwritten stretch, or a missing or repeated one."""
    start = rng.randrange(len(whole))
    end = min(len(whole), start + rng.choice([1, 8, 512]))
    middle = {
        "flip": bytes([whole[start] ^ 1 << rng.randrange(8)]) + whole[start + 1 : end],
        "zeros": bytes(end - start),
        "noise": rng.randbytes(end - start),
        "missing": b"",
        "twice": 2 * whole[start:end],
    }
    return whole[:start] + middle[rng.choice(list(middle))] + whole[end:]
