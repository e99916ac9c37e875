"""The server half of a run: rounds, clients' turns, averages and the server's step."""

from lightning_spectral.server.executor import Executor, SequentialExecutor

__all__ = ["Executor", "SequentialExecutor"]
