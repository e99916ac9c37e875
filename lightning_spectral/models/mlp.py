"""A multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    The defaults are the "2NN" of McMahan et al. (2017) for 28 x 28 images: 199,210 parameters.

    Args:
        in_features: Values per example, after flattening.
        hidden_features: Widths of the hidden layers, first to last.

    Shape:
        Input ``(batch, ...)`` with ``in_features`` values per example, output ``(batch, num_classes)``.

    Reference:
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data" (2017), section 3.

    Example:
        >>> model = MLP()
        >>> model(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
        >>> sum(parameter.numel() for parameter in model.parameters())
        199210
    """

    def __init__(
        self, in_features: int = 784, hidden_features: Sequence[int] = (200, 200), num_classes: int = 10
    ) -> None:
        super().__init__()
        self.in_features = in_features
        widths = [in_features, *hidden_features]
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.head = nn.Linear(widths[-1], num_classes)

    def example_input(self) -> Tensor:
        return torch.zeros(1, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits
