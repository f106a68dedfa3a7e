"""Darknet-19 and TinyDarknet, layer by layer as published."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Channels of a 3x3 convolution; -channels of a 1x1 one; "M" halves height and width.
DARKNET19 = [32, "M", 64, "M", 128, -64, 128, "M", 256, -128, 256, "M", 512, -256, 512, -256, 512, "M",
             1024, -512, 1024, -512, 1024]  # fmt: skip
TINY = [16, "M", 32, "M", -16, 128, -16, 128, "M", -32, 256, -32, 256, "M", -64, 512, -64, 512, -128]


class Convolution3x3(nn.Conv2d):
    """A 3x3 convolution without bias that keeps the map's size: images [n, c, h, w] -> [n, channels, h, w].

    On maps of 1x1 and 2x2 most of the kernel meets padding. There the same sum is a dense product of all inputs with
    all outputs: a ninth and 4/9 of the work, with the same weights and, to rounding, the same result and gradient.
    On the CPU only: at this size a GPU is bound by kernel launches and by reading the weights, not by arithmetic (a
    9x smaller product of 128 images saves 10 us, and selecting its weights from the kernel costs as much).
    """

    def __init__(self, channels: int, outputs: int):
        super().__init__(channels, outputs, 3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        side = images.shape[-1]
        # An exported graph must serve other image sizes than the one it was traced with.
        if images.device.type != "cpu" or images.shape[-2] != side or side > 2 or torch.compiler.is_compiling():
            return super().forward(images)
        return dense_convolution(images, self.weight)


def dense_convolution(images: Tensor, weight: Tensor) -> Tensor:
    """The 3x3 convolution, padding 1, of images [n, c, s, s], s = 1 or 2, with weight [k, c, 3, 3], as one product.

    Output (i, j) sees input (a, b) through the kernel's cell (a - i + 1, b - j + 1), which always exists.
    """
    n = len(images)
    if images.shape[-1] == 1:
        return F.linear(images.flatten(1), weight[:, :, 1, 1])[:, :, None, None]
    pixels = images.permute(0, 2, 3, 1).reshape(n, -1)  # a view where the memory is channels-last
    by_cell = weight.permute(0, 2, 3, 1).contiguous()  # whose windows are faster to copy
    windows = [by_cell[:, 1 - i : 3 - i, 1 - j : 3 - j] for i in (0, 1) for j in (0, 1)]
    matrix = torch.stack(windows).flatten(0, 1).flatten(1)
    return F.linear(pixels, matrix).unflatten(1, (2, 2, -1)).permute(0, 3, 1, 2)


class Darknet(nn.Module):
    """Convolutions with batch norm and LeakyReLU(0.1), a last 1x1 convolution to the classes, then their global mean.

    layers: DARKNET19 (table 6, YOLO9000, arXiv 1612.08242) or TINY (darknet's tiny.cfg). shape: [3, h, w] of an image.
    width: a factor on all channel counts. pools: how many poolings to keep, from the first on, for small images; None
    keeps all. dropout: of whole channels before the last convolution, the only place where it does not disturb batch
    norm.
    """

    def __init__(
        self, layers: list, shape: Sequence[int], outputs: int, dropout: float = 0.0, width: float = 1.0,
        pools: int | None = None,
    ):  # fmt: skip
        super().__init__()
        available = layers.count("M")
        if len(shape) != 3 or shape[0] != 3:
            raise ValueError(f"Darknet expects images [3, height, width], got samples of shape {list(shape)}")
        if not 0 <= (available if pools is None else pools) <= available:
            raise ValueError(f"model.pools: expected 0 to {available}, or null for all, got {pools}")
        if not width > 0:
            raise ValueError(f"model.width: expected a positive factor, got {width}")
        body, channels = nn.Sequential(), 3
        for place, layer in enumerate(layers):
            if layer != "M":
                outer, channels = channels, max(1, round(abs(layer) * width))
                kind = Convolution3x3(outer, channels) if layer > 0 else nn.Conv2d(outer, channels, 1, bias=False)
                body.extend([kind, nn.BatchNorm2d(channels), nn.LeakyReLU(0.1, inplace=True)])
            elif pools is None or layers[:place].count("M") < pools:
                body.append(nn.MaxPool2d(2))
        self.body = body
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.body(images))).mean((2, 3))
