"""Partitions: which examples belong to which client, decided once."""

from lightning_spectral.partition.base import Partitioner
from lightning_spectral.partition.dirichlet import DirichletPartitioner
from lightning_spectral.partition.labels import Labels, class_indices, dataset_labels, labels_in_examples
from lightning_spectral.partition.pachinko import PachinkoPartitioner
from lightning_spectral.partition.partition import Partition, hold_out
from lightning_spectral.partition.report import PartitionReport, report
from lightning_spectral.partition.without_labels import IIDPartitioner, NaturalPartitioner

__all__ = [
    "DirichletPartitioner",
    "IIDPartitioner",
    "Labels",
    "NaturalPartitioner",
    "PachinkoPartitioner",
    "Partition",
    "PartitionReport",
    "Partitioner",
    "class_indices",
    "dataset_labels",
    "hold_out",
    "labels_in_examples",
    "report",
]
