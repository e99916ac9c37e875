"""The counts, the text and the plot of a report."""

from pathlib import Path

import pytest
import torch

from lightning_spectral.partition import IIDPartitioner, Partition, report

LABELS = torch.tensor([3, 3, 7, 3, 9, 7])
PARTITION = Partition.from_lists([[0, 1, 2], [4], [], [5, 3]])


def test_histogram_counts_each_client_and_class() -> None:
    seen = report(PARTITION, LABELS)
    assert seen.classes is not None
    assert seen.histogram is not None
    assert seen.classes.tolist() == [3, 7, 9]
    assert seen.histogram.tolist() == [[2, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]]
    assert seen.counts.tolist() == [3, 1, 0, 2]


def test_mean_classes_counts_shares_above_the_threshold() -> None:
    seen = report(PARTITION, LABELS)
    assert seen.mean_classes() == (2 + 1 + 0 + 2) / 4
    assert seen.mean_classes(0.4) == (1 + 1 + 0 + 2) / 4
    assert seen.mean_classes(0.5) == (1 + 1 + 0 + 0) / 4


def test_long_tables_are_cut() -> None:
    text = str(report(IIDPartitioner(40)(400, None, torch.Generator().manual_seed(0)), torch.arange(400) % 9))
    assert text.startswith("40 clients, 400 examples; 10 / 10 / 10 examples per client")
    assert text.endswith("... and 30 more clients")
    assert max(map(len, text.splitlines())) <= 110


def test_report_without_labels_has_sizes_only() -> None:
    seen = report(PARTITION)
    assert (seen.histogram, seen.classes) == (None, None)
    assert "classes" not in str(seen)
    with pytest.raises(ValueError, match="made without labels"):
        seen.mean_classes()


def test_too_few_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 6\), got shape \(5,\)"):
        report(PARTITION, LABELS[:5])


@pytest.mark.parametrize("labels", [LABELS, None])
def test_bars_stack_to_the_sizes(labels: torch.Tensor | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = report(PARTITION, labels)
    axes = seen.plot(tmp_path / "split.png")
    assert (tmp_path / "split.png").stat().st_size > 0
    tops = [max(bar.get_y() + bar.get_height() for bar in column) for column in zip(*axes.containers, strict=True)]
    assert tops == seen.counts.tolist()


def test_plot_draws_on_the_axes_it_is_given() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    assert report(PARTITION, LABELS).plot(axes) is axes
    assert len(axes.patches) == 3 * 4
