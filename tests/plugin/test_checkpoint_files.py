"""Checkpoint files: none half-written is picked up, a damaged one is refused by name, and nothing in them runs."""

import inspect
import io
import os
import random
import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from federation import Fit
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.plugin import AtomicCheckpointIO
from lightning_spectral.plugin.checkpoint_files import check_loadable

CONTENT = {"weights": torch.arange(1000.0), "round": 3}
WITHOUT_OPTIMIZERS = {"epoch": 5, "global_step": 6, "loops": {}, "state_dict": {}}


def write(path: Path, num_rounds: int, **more: Any) -> None:
    """Write the parts of a Trainer's checkpoint that matter here."""
    progress = {"epoch": num_rounds - 1, "global_step": num_rounds, "loops": {}, "optimizer_states": []}
    AtomicCheckpointIO().save_checkpoint({**CONTENT, **progress, **more}, path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints, of one round and of two; the file of the first is newer."""
    for num_rounds, name in ((1, "one.ckpt"), (2, "two.ckpt")):
        write(tmp_path / name, num_rounds)
        set_age(tmp_path / name, 100 * num_rounds)
    return tmp_path


def set_age(path: Path, seconds: int) -> None:
    os.utime(path, (2e9 - seconds, 2e9 - seconds))


def cut(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])


def flip_a_weight(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(CONTENT["weights"].numpy().tobytes()) + 2000] ^= 1  # type: ignore[attr-defined]
    path.write_bytes(damaged)


class Trusted:
    """An object of a class that a user allows."""


class TestWriting:
    def test_what_is_written_is_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / "new folder" / "one.ckpt"
        AtomicCheckpointIO().save_checkpoint(CONTENT, path)
        for plugin in (AtomicCheckpointIO(), TorchCheckpointIO()):
            loaded = plugin.load_checkpoint(path)
            assert torch.equal(loaded["weights"], CONTENT["weights"])
            assert loaded["round"] == 3
        assert [file.name for file in path.parent.iterdir()] == ["one.ckpt"]

    def test_a_write_that_is_cut_short_leaves_the_old_file(self, saved: Path, monkeypatch: Any) -> None:
        before = (saved / "two.ckpt").read_bytes()

        def half(checkpoint: Any, file: Any) -> None:
            file.write(before[: len(before) // 2])
            raise OSError("the disk is full")

        monkeypatch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="the disk is full"):
            AtomicCheckpointIO().save_checkpoint(CONTENT, saved / "two.ckpt")
        assert (saved / "two.ckpt").read_bytes() == before
        assert ls.latest_checkpoint(saved) == str(saved / "two.ckpt")
        monkeypatch.undo()
        write(saved / "two.ckpt", 2)
        assert sorted(file.name for file in saved.iterdir()) == ["one.ckpt", "two.ckpt"]  # the leftover file is gone

    def test_a_link_is_replaced_and_what_it_shows_stays(self, saved: Path) -> None:
        link = saved / "last.ckpt"
        link.symlink_to("one.ckpt")
        AtomicCheckpointIO().save_checkpoint({"round": 4}, link)
        assert torch.load(saved / "one.ckpt", weights_only=True)["round"] == 3
        assert torch.load(link, weights_only=True)["round"] == 4

    def test_a_federated_fit_writes_whole_files(self, lit: Any, data: Any, fit: Fit) -> None:
        assert isinstance(fit(lit, data).trainer.strategy.checkpoint_io, AtomicCheckpointIO)

    def test_a_plugin_that_the_user_chose_stays(self, lit: Any, data: Any, fit: Fit) -> None:
        class Own(TorchCheckpointIO):
            """Writes somewhere else."""

        plugin = Own()
        assert fit(lit, data, trainer={"plugins": [plugin]}).trainer.strategy.checkpoint_io is plugin


class TestFinding:
    def test_the_most_rounds_are_found_whatever_the_age_of_the_files(self, saved: Path) -> None:
        assert ls.latest_checkpoint(saved) == str(saved / "two.ckpt")
        write(saved / "another.ckpt", 2)  # of two from the same round, the newer one is found
        set_age(saved / "another.ckpt", 300)
        assert ls.latest_checkpoint(saved) == str(saved / "two.ckpt")
        set_age(saved / "another.ckpt", 50)
        assert ls.latest_checkpoint(saved) == str(saved / "another.ckpt")

    def test_sub_folders_are_searched(self, lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
        save = ModelCheckpoint(tmp_path, filename="{epoch}-{fl/loss:.2f}")
        fit(lit, data, callbacks=[save], trainer={"enable_checkpointing": True})
        found = ls.latest_checkpoint(tmp_path)
        assert found == save.best_model_path
        assert Path(found).parent != tmp_path

    def test_classes_that_the_user_allows_are_loaded(self, saved: Path) -> None:
        write(saved / "three.ckpt", 3, own=Trusted(), names=OrderedDict(a=torch.float16))
        with pytest.raises(ValueError, match="Allow their classes"):
            ls.latest_checkpoint(saved)
        torch.serialization.add_safe_globals([Trusted])
        try:
            assert ls.latest_checkpoint(saved) == str(saved / "three.ckpt")
        finally:
            torch.serialization.clear_safe_globals()

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*cannot be resumed from and is skipped")
    def test_no_damaged_bit_is_believed(self, tmp_path: Path) -> None:
        """A file with one flipped bit is found only if it still holds what was written."""
        path, found = tmp_path / "one.ckpt", 0
        write(path, 4, weights=torch.arange(5.0))
        whole = path.read_bytes()
        for position in range(0, len(whole), 3):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
            if ls.latest_checkpoint(tmp_path) is not None:
                found += 1
                loaded = torch.load(path, weights_only=True)
                assert loaded["global_step"] == 4
                assert torch.equal(loaded["weights"], torch.arange(5.0))
        assert 0 < found < len(whole) // 3  # flips in padding do no harm

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            *((partial(cut, share=share), r"\w+: ") for share in (0.0, 0.1, 0.5, 0.9, 0.999)),
            (flip_a_weight, "the checksum of .*/data/0 does not match"),
            (partial(torch.save, WITHOUT_OPTIMIZERS), "it has no optimizer_states, and a run"),
            *(
                (partial(write, num_rounds=3, global_step=number), r"its global_step must be a whole number, got \w+\.")
                for number in (None, 2.5, "3", [4])
            ),
        ],
    )
    def test_a_file_that_no_run_can_be_resumed_from_is_passed_over(self, spoil: Any, message: str, saved: Path) -> None:
        write(path := saved / "three.ckpt", 3)
        spoil(path)
        with pytest.warns(ls.SpectralWarning, match=rf"three.ckpt cannot be resumed from and is skipped: {message}"):
            assert ls.latest_checkpoint(saved) == str(saved / "two.ckpt")

    def test_a_file_in_place_of_a_folder_is_returned_if_a_run_can_be_resumed_from_it(self, saved: Path) -> None:
        assert ls.latest_checkpoint(saved / "one.ckpt") == str(saved / "one.ckpt")
        torch.save({"state_dict": {}}, saved / "two.ckpt")
        with pytest.raises(ValueError, match=r"two.ckpt cannot be resumed from: it has no .*; give the folder"):
            ls.latest_checkpoint(saved / "two.ckpt")
        assert ls.latest_checkpoint(saved / "not yet written.ckpt") is None

    def test_a_pattern_is_refused(self, saved: Path) -> None:
        with pytest.raises(ValueError, match=r"got the pattern '.*/\*.ckpt'; leave the pattern out"):
            ls.latest_checkpoint(f"{saved}/*.ckpt")

    def test_nothing_is_found_where_nothing_is(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert ls.latest_checkpoint(tmp_path) is None
        assert "nothing at" not in caplog.text
        assert ls.latest_checkpoint(tmp_path / "missing") is None
        assert "missing, so there is no checkpoint to resume from" in caplog.text
        (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
        (tmp_path / "one.ckpt.part").write_bytes(b"half")
        assert ls.latest_checkpoint(tmp_path) is None


def test_a_servers_step_that_failed_is_not_saved(lit: Any, data: Any, quiet: Any, tmp_path: Path) -> None:
    class HalfStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError("no room for the second half")

    settings = {**quiet, "enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path / "c")]}
    trainer = pl.Trainer(max_epochs=1, **settings)
    model = ls.FederatedModule(lit, clients_per_round=2, server_optimizer=lambda p: HalfStep(p, lr=1.0))
    with pytest.raises(MemoryError, match="no room for the second half"):
        trainer.fit(model, data)
    with pytest.raises(ls.errors.RoundError, match="belong to no round and are not saved"):
        trainer.save_checkpoint(tmp_path / "c" / "half.ckpt")
    assert ls.latest_checkpoint(tmp_path / "c") is None


@pytest.mark.parametrize("content", [b"", b"PK, and then the disk was full", b"epoch: 3"])
def test_a_file_that_is_not_whole_is_refused_by_name(
    content: bytes, lit: Any, data: Any, fit: Fit, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    readers: list[Callable[[], Any]] = [
        lambda: fit(lit, data, ckpt_path=path),
        lambda: ls.FederatedModule.load_from_checkpoint(path, module=lit),
        lambda: ls.plugin.load_user_module(path, type(lit)),
    ]
    message = r"last\.ckpt is empty or not a whole checkpoint: .*; latest_checkpoint"
    for read in readers:
        with pytest.raises(ValueError, match=message):
            read()


WEIGHTS = {"w": torch.arange(5.0), "b": torch.ones(3, dtype=torch.bfloat16)}
PROGRESS = {"epoch": 1, "global_step": 2, "loops": {}, "optimizer_states": []}
CHECKPOINT = {**PROGRESS, "state_dict": WEIGHTS, "federation": {}, "pytorch-lightning_version": pl.__version__}


class LitWeights(pl.LightningModule):
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
    def test_of_torchscript_when_a_fit_loads_it(self, stage: str, script: Any, lit: Any, data: Any, quiet: Any) -> None:
        model = ls.FederatedModule(lit, clients_per_round=2)
        with pytest.raises(ValueError, match=r"epoch=9.ckpt .*: it is a TorchScript archive"):
            getattr(pl.Trainer(max_epochs=1, **quiet), stage)(model, data, ckpt_path=script)

    def test_of_a_pickle_when_a_file_is_checked(self, saved: Path) -> None:
        write(path := saved / "three.ckpt", 3, own=Call(pytest.fail, "it was executed"))
        check_loadable(path)
        for given in (path, saved):
            with pytest.raises(ValueError, match=r"three.ckpt holds objects other than tensors and plain .*\. Allow"):
                ls.latest_checkpoint(given)


class TestDamage:
    @pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
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
        ls.plugin.AtomicCheckpointIO().save_checkpoint({"weights": [torch.arange(4.0)], "round": 3}, path)
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
    is_newer = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters  # since Lightning 2.6
    loaded = ls.plugin.AtomicCheckpointIO().load_checkpoint(path, **({"weights_only": False} if is_newer else {}))
    assert loaded.keys() - {"federation_digest"} == saved_by_users().keys()


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
