"""The convolutional net of the FEMNIST experiments."""

import torch
from torch import Tensor, nn


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
