"""One round after another: who trains next, what came back, and the step that follows."""

from lightning_spectral.server.executor import Executor, SequentialExecutor

__all__ = ["Executor", "SequentialExecutor"]
