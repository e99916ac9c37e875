"""Compact convolutional transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.models.attention import SelfAttention

STEM_CHANNELS = 64  # between the two convolutions of the tokenizer, in the authors' code


class DropPath(nn.Module):
    """Drops a branch for whole examples while training (stochastic depth, Huang et al. 2016).

    Input and output have shape ``(batch, ...)``. Branches that are kept are divided by ``1 - p``.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return branch
        return branch * F.dropout(branch.new_ones(len(branch), *[1] * (branch.ndim - 1)), self.p)


class CCTBlock(nn.Module):
    """Attention and an MLP with residual connections, normalised in the same places as in the authors' code.

    The second LayerNorm comes before the MLP's shortcut splits off, not inside the branch as in a usual pre-norm block.
    Input and output have shape ``(batch, length, width)``.
    """

    def __init__(self, width: int, num_heads: int, mlp_ratio: int, attention_dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, qkv_bias=False, dropout=attention_dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, mlp_ratio * width)
        self.contract = nn.Linear(mlp_ratio * width, width)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.norm2(tokens + self.drop_path(self.attention(self.norm1(tokens))))
        branch: Tensor = self.drop_path(self.contract(F.gelu(self.expand(tokens))))
        return tokens + branch


class CCT(nn.Module):
    """A transformer over the tokens of two convolutions, with sequence pooling; by default CCT-6/3x2.

    The model of Korzhenkov & Louizos (2024) for TinyImageNet and CIFAR-100. For 10 classes of 32 x 32 images it has
    3,326,923 parameters and takes 0.241 billion multiply-adds in its layers, in agreement with the authors' 3.327M and
    0.241G.

    The model follows the authors' code, ``SHI-Labs/Compact-Transformers``: six layers, four heads, width 256, MLP of
    twice the width; two bias-free 3x3 convolutions with ReLU and 3x3 max-pooling of stride 2; learned positions;
    attention without bias; attention dropout 0.1; stochastic depth rising with the layer from 0 to 0.1; no other
    dropout; linear layers initialised from a truncated normal with standard deviation 0.02, positions with 0.2. The
    2024 paper only says "CCT-6/3x2". By our choice, queries, keys and values are separate layers; see `SelfAttention`.

    Args:
        image_size: Height and width of the image: 32 for CIFAR, 64 for TinyImageNet.
        width: Size of each token; ``num_heads`` must divide it.
        mlp_ratio: Width of each MLP in units of ``width``.
        attention_dropout: Probability of dropping an attention weight.
        stochastic_depth: Probability of dropping a branch of the last block; it falls linearly to 0 for the first
            block.

    Shape:
        Input ``(batch, in_channels, image_size, image_size)``, output ``(batch, num_classes)``.

    Reference:
        Hassani et al., "Escaping the big data paradigm with compact transformers" (2021), section 3.
        Korzhenkov & Louizos (2024), section 4.1.

    Example:
        >>> model = CCT(num_classes=10, width=16, num_layers=2)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        width: int = 256,
        num_heads: int = 4,
        num_layers: int = 6,
        mlp_ratio: int = 2,
        attention_dropout: float = 0.1,
        stochastic_depth: float = 0.1,
    ) -> None:
        super().__init__()
        self.image_shape = (in_channels, image_size, image_size)
        self.conv1 = nn.Conv2d(in_channels, STEM_CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(STEM_CHANNELS, width, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        side = -(-image_size // 4)  # each pooling halves, rounding up
        self.positions = nn.Parameter(torch.empty(side * side, width))
        rates = [stochastic_depth * layer / max(num_layers - 1, 1) for layer in range(num_layers)]
        self.blocks = nn.Sequential(*(CCTBlock(width, num_heads, mlp_ratio, attention_dropout, rate) for rate in rates))
        self.norm = nn.LayerNorm(width)
        self.pool_weights = nn.Linear(width, 1)
        self.head = nn.Linear(width, num_classes)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.positions, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def example_input(self) -> Tensor:
        return torch.zeros(1, *self.image_shape)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.image_shape:
            raise ValueError(
                f"Images must be of shape {self.image_shape}, got {tuple(images.shape[1:])}; positions are learned, so "
                "set `image_size` and `in_channels` to those of the data."
            )
        features = self.pool(torch.relu(self.conv2(self.pool(torch.relu(self.conv1(images))))))
        tokens = self.norm(self.blocks(features.flatten(2).transpose(1, 2) + self.positions))
        shares = self.pool_weights(tokens).softmax(1)  # sequence pooling: how much each token counts
        logits: Tensor = self.head((shares * tokens).sum(1))
        return logits
