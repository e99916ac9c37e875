"""ResNet-18 for small images, with GroupNorm."""

import torch
from torch import Tensor, nn


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
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        num_groups: int = 2,
        width: int = 64,
        image_size: int = 32,
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
