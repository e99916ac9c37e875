import pytest
import torch
from torch import Tensor

from lightning_spectral.sums.change_blocks import ChangeBlocks, block_size

BLOCK = block_size(torch.zeros(1))


def flat_change(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reassemble the change from its blocks."""
    blocks = ChangeBlocks(before, dict.fromkeys(before, 0.0))
    whole = torch.full((blocks.size,), float("nan"), dtype=torch.float64)
    for block, change in blocks.changes(after):
        whole[block.where] = change
    return {name: whole[blocks.ranges[name]].view(tensor.shape) for name, tensor in before.items()}


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 4), (0, 2), (), (5,)],
        [(BLOCK,), (1,)],
        [(BLOCK + 1,), (7, 3)],
        [(2, BLOCK, 2), (4,), (3 * BLOCK,)],
        [(0,)],
        [],
    ],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_blocks_put_together_are_the_changes(shapes: list[tuple[int, ...]], transpose: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        return {
            str(i): tensor.movedim(0, -1) if transpose and tensor.ndim else tensor for i, tensor in enumerate(drawn)
        }

    before, after = draw(), draw()
    for name, change in flat_change(before, after).items():
        assert torch.equal(change, (after[name] - before[name]).double())


def test_trained_tensors_may_lie_in_memory_in_another_order() -> None:
    before, after = torch.randn(300, 500), torch.randn(500, 300).T
    assert torch.equal(flat_change({"w": before}, {"w": after})["w"], (after - before).double())
    assert torch.equal(flat_change({"w": after}, {"w": before})["w"], (before - after).double())


def test_no_block_is_much_larger_than_its_size_and_small_tensors_share_one() -> None:
    tensors = {str(i): torch.zeros(100) for i in range(50)} | {"large": torch.zeros(1000, 1000).T}
    blocks = ChangeBlocks(tensors, dict.fromkeys(tensors, 0.0))
    sizes = [len(change) for _, change in blocks.changes(tensors)]
    assert max(sizes) <= BLOCK
    assert sizes == [5000, *[65_000] * 15, 25_000]  # small ones together, then whole rows


def test_tensors_of_different_kinds_share_no_block() -> None:
    tensors = {str(i): torch.zeros(3) for i in range(6)}
    blocks = ChangeBlocks(tensors, {name: float(int(name) % 2) for name in tensors})
    assert [{piece.name for piece in block.pieces} for block, _ in blocks.changes(tensors)] == [
        {"0", "2", "4"},
        {"1", "3", "5"},
    ]


def test_changes_are_formed_in_the_tensors_own_type_unless_told() -> None:
    before, after = {"h": torch.tensor([-60_000.0]).half()}, {"h": torch.tensor([60_000.0]).half()}
    blocks = ChangeBlocks(before, {"h": 0.0})
    assert [float(change) for _, change in blocks.changes(after)] == [float("inf")]
    assert [float(change) for _, change in blocks.changes(after, in_float64={"h"})] == [120_000.0]
