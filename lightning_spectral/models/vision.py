"""Models for images: a multilayer perceptron, FEMNIST's convolutional net, ResNet-18 with GroupNorm, CCT."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.models.attention import SelfAttention


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


class FEMNISTCNN(nn.Module):
    """Two 5x5 convolutions, each with ReLU and 2x2 max-pooling, followed by dense layers.

    The architecture has three sources, which differ in the dense layers:

    =============================  ===================  ===============  ==========
    source                         ``hidden_features``  ``num_classes``  parameters
    =============================  ===================  ===============  ==========
    LEAF (the default)             2048                 62               6,603,710
    McMahan et al. (2017)          512                  10               1,663,370
    PriSM's code                   ``None``             62               246,590
    =============================  ===================  ===============  ==========

    Args:
        num_classes: Number of classes; FEMNIST has 10 digits and 52 letters.
        image_size: Height and width of the image, at least 4.
        channels: Output channels of the two convolutions; 32 and 64 in all three sources.
        hidden_features: Width of the hidden dense layer; ``None`` for no hidden layer.

    Shape:
        Input ``(batch, in_channels, image_size, image_size)``, output ``(batch, num_classes)``.

    Note:
        Table 5 of PriSM lists 64 kernels in both convolutions, 3x3 in the second, and 10 classes. This class follows
        its public code instead. By our choice, initial weights are PyTorch's; PriSM's code draws its own.

    Reference:
        Caldas et al., "LEAF: a benchmark for federated settings" (2018), ``models/femnist/cnn.py``.
        McMahan et al., "Communication-efficient learning of deep networks from decentralized data" (2017), section 3.
        Niu et al., "PriSM" (2023), ``model/femnist.py``.

    Example:
        >>> model = FEMNISTCNN(hidden_features=None)
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
        >>> sum(parameter.numel() for parameter in model.parameters())
        246590
    """

    def __init__(
        self,
        num_classes: int = 62,
        in_channels: int = 1,
        image_size: int = 28,
        channels: tuple[int, int] = (32, 64),
        hidden_features: int | None = 2048,
    ) -> None:
        super().__init__()
        if image_size < 4:
            raise ValueError(f"`image_size` must be at least 4, for two 2x2 poolings, got {image_size}.")
        self.image_shape = (in_channels, image_size, image_size)
        self.conv1 = nn.Conv2d(in_channels, channels[0], 5, padding=2)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, padding=2)
        num_features = channels[1] * (image_size // 4) ** 2
        self.hidden = None if hidden_features is None else nn.Linear(num_features, hidden_features)
        self.head = nn.Linear(num_features if hidden_features is None else hidden_features, num_classes)
        self.pool = nn.MaxPool2d(2)

    def example_input(self) -> Tensor:
        return torch.zeros(1, *self.image_shape)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(images)))
        x = self.pool(torch.relu(self.conv2(x))).flatten(1)
        if self.hidden is not None:
            x = torch.relu(self.hidden(x))
        logits: Tensor = self.head(x)
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al. 2016, figure 2 and option B); the first one has the stride."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, num_groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(num_groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(num_groups, out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.GroupNorm(num_groups, out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 whose first convolution is 3x3 with stride 1, without max-pooling, and with GroupNorm.

    The model of Korzhenkov & Louizos (2024) for CIFAR-10 and CIFAR-100, and of PriSM for CIFAR-10 (its Table 4) except
    for the normalisation. With 10 classes it has 11,173,962 parameters and takes 555 million multiply-adds for a 32 x
    32 image.

    Details that the papers leave open:

    - Two groups in each GroupNorm, as in Reddi et al. (2021), whose data preparation the 2024 paper uses.
    - Shortcuts that change shape are 1x1 convolutions with a normalisation: option B of He et al. (2016).
    - No max-pooling after the first convolution: PriSM's Table 4 has none.
    - Convolutions use He initialisation, normal with variance 2 / fan-out, as in torchvision's ResNet; the last layer
      uses PyTorch's default.

    Args:
        num_groups: Groups of each GroupNorm; must divide ``width``.
        width: Channels of the first stage, 64 in the papers; the others have twice, four and eight times as many.
        image_size: Height and width of `example_input`; the model takes images of any size.

    Shape:
        Input ``(batch, in_channels, height, width)``, output ``(batch, num_classes)``.

    Reference:
        He et al., "Deep residual learning for image recognition" (2016).
        Hsieh et al., "The non-IID data quagmire of decentralized machine learning" (2020), on GroupNorm.
        Reddi et al., "Adaptive federated optimization" (2021).
        Korzhenkov & Louizos (2024), section 4.1. Niu et al., "PriSM" (2023), Table 4.

    Example:
        >>> model = ResNet18(num_classes=10, width=8)
        >>> model(model.example_input()).shape
        torch.Size([1, 10])
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, num_groups: int = 2, width: int = 64, image_size: int = 32
    ) -> None:
        super().__init__()
        if width % num_groups:
            raise ValueError(f"`num_groups` must divide `width`, got {num_groups} groups of {width} channels.")
        self.image_shape = (in_channels, image_size, image_size)
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(num_groups, width)
        before, blocks = width, []
        for after, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [BasicBlock(before, after, stride, num_groups), BasicBlock(after, after, 1, num_groups)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def example_input(self) -> Tensor:
        return torch.zeros(1, *self.image_shape)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(torch.relu(self.norm(self.conv(images))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


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
