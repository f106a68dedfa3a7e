"""Darknet-19 and TinyDarknet, layer by layer as published."""

from torch import Tensor, nn

# Channels of a 3x3 convolution; -channels of a 1x1 one; "M" halves height and width.
DARKNET19 = [32, "M", 64, "M", 128, -64, 128, "M", 256, -128, 256, "M", 512, -256, 512, -256, 512, "M",
             1024, -512, 1024, -512, 1024]  # fmt: skip
TINY = [16, "M", 32, "M", -16, 128, -16, 128, "M", -32, 256, -32, 256, "M", -64, 512, -64, 512, -128]


class Darknet(nn.Module):
    """Convolutions with batch norm and LeakyReLU(0.1), a last 1x1 convolution to the classes, then their global mean.

    layers: DARKNET19 (table 6, YOLO9000, arXiv 1612.08242) or TINY (darknet's tiny.cfg). Images [n, 3, h, w].
    width: multiplies every number of channels. pools: keeps only the first so many poolings, for small images.
    dropout: of whole channels before the last convolution, the one place where it does not disturb batch norm.
    """

    def __init__(self, layers: list, outputs: int, dropout: float = 0.0, width: float = 1.0, pools: int | None = None):
        super().__init__()
        available = layers.count("M")
        if pools is not None and not 0 <= pools <= available:
            raise ValueError(f"model.pools: expected 0 to {available}, or null for all, got {pools}")
        if not width > 0:
            raise ValueError(f"model.width: expected a positive factor, got {width}")
        left = available if pools is None else pools
        body: list[nn.Module] = []
        channels = 3
        for layer in layers:
            if layer == "M":
                if left > 0:
                    body.append(nn.MaxPool2d(2))
                left -= 1
                continue
            kernel = 3 if layer > 0 else 1
            wanted = max(1, round(abs(layer) * width))
            body += [
                nn.Conv2d(channels, wanted, kernel, padding=kernel // 2, bias=False),
                nn.BatchNorm2d(wanted),
                nn.LeakyReLU(0.1, inplace=True),
            ]
            channels = wanted
        self.body = nn.Sequential(*body)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(channels, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.body(images))).mean((2, 3))
