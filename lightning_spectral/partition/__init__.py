"""Partitions: which examples belong to which client, decided once."""

from lightning_spectral.partition.dirichlet import DirichletPartitioner, PachinkoPartitioner
from lightning_spectral.partition.few_labels import LabelsPerClient, ShardPartitioner
from lightning_spectral.partition.labels import Labels, class_indices, dataset_labels, labels_in_examples
from lightning_spectral.partition.partition import (
    IIDPartitioner,
    NaturalPartitioner,
    Partition,
    Partitioner,
    PartitionReport,
    hold_out,
    report,
)
from lightning_spectral.partition.sizes import SizeLaw

__all__ = [
    "DirichletPartitioner",
    "IIDPartitioner",
    "Labels",
    "LabelsPerClient",
    "NaturalPartitioner",
    "PachinkoPartitioner",
    "Partition",
    "PartitionReport",
    "Partitioner",
    "ShardPartitioner",
    "SizeLaw",
    "class_indices",
    "dataset_labels",
    "hold_out",
    "labels_in_examples",
    "report",
]
