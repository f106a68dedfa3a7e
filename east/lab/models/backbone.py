"""Networks of torchvision and timm with pretrained weights: `model=backbone`."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models as torchvision

from east.choices import choose
from east.lab.data.common import DataError

DEFAULT, NONE = "DEFAULT", "none"
SIZES = range(8, 1025)  # pixels
UNSUITABLE = ("googlenet", "inception_v3", "regnet")  # several outputs, or built only where their weights are


class Backbone(nn.Module):
    """Images [n, 3, h, w] -> logits [n, outputs]: the network `arch`, whose last layer is new.

    shape: of an image; any other size than `size` is scaled to it. weights: DEFAULT, none or a file with a state dict.
    freeze: only the last layer learns, and batch norm keeps its statistics. dropout: before the last layer.
    """

    def __init__(
        self, shape: Sequence[int], outputs: int, dropout: float = 0.0, arch: str = "resnet18",
        weights: str | None = DEFAULT, freeze: bool = False, size: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.size = preprocessing(arch)[0] if size is None else size
        if len(shape) != 3 or shape[0] != 3:
            raise ValueError(f"model=backbone takes images [3, height, width], got samples of shape {list(shape)}")
        if self.size not in SIZES:
            raise ValueError(f"model.size: expected {SIZES[0]} to {SIZES[-1]} pixels, or null, got {self.size}")
        if of_torchvision(arch):
            self.net = torchvision.get_model(arch, weights=None, num_classes=outputs)
        else:
            import timm

            with torch.device("cpu"):  # some keep tensors that no state dict holds
                self.net = timm.create_model(arch, num_classes=outputs)
        *_, self.last = (name for name, layer in self.net.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d))
        if weights not in (None, NONE):
            self.load(arch, str(weights))
        self.frozen = freeze
        self.net.requires_grad_(not freeze)
        self.head.requires_grad_().register_forward_pre_hook(lambda layer, x: F.dropout(x[0], dropout, layer.training))

    @property
    def head(self) -> nn.Module:
        return self.net.get_submodule(self.last)

    def load(self, arch: str, weights: str) -> None:
        """Take over pretrained weights, except those of the last layer."""
        state = downloaded(arch) if weights == DEFAULT else read(Path(weights).expanduser())
        own = {name: tensor for name, tensor in self.net.state_dict().items() if name.startswith(f"{self.last}.")}
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()} | own
        try:
            self.net.load_state_dict(state)
        except (RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"model.weights={weights}: these are not weights of model.arch={arch}: {reason}") from error

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        if self.frozen:
            self.net.eval()
            self.head.train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=True)
        return self.net(images)


def of_torchvision(arch: str) -> bool:
    """True if torchvision has this architecture, False if timm does; ValueError otherwise."""
    names = [name for name in torchvision.list_models(module=torchvision) if not name.startswith(UNSUITABLE)]
    if arch not in names and find_spec("timm"):
        import timm

        if timm.is_model(arch):
            return False
    return bool(choose("model.arch", arch, names))


def preprocessing(arch: str) -> tuple[int, Tensor, Tensor]:
    """Height and width of the images that its default weights expect, and the mean and deviation to scale them by."""
    if of_torchvision(arch):
        expected = torchvision.get_model_weights(arch).DEFAULT.transforms()
        return expected.crop_size[0], torch.tensor(expected.mean), torch.tensor(expected.std)
    from timm.models import PretrainedCfg, get_pretrained_cfg

    expected = get_pretrained_cfg(arch) or PretrainedCfg()
    return expected.input_size[-1], torch.tensor(expected.mean), torch.tensor(expected.std)


def downloaded(arch: str) -> Mapping[str, Tensor]:
    """The default weights of an architecture, which its library downloads once and keeps in its own cache."""
    where = "timm's name for it on its hub"
    try:
        if of_torchvision(arch):
            default = torchvision.get_model_weights(arch).DEFAULT
            where = default.url
            return default.get_state_dict(check_hash=True, weights_only=True, map_location="cpu")
        import timm

        return timm.create_model(arch, pretrained=True).state_dict()
    except Exception as error:  # of networks, disks, hubs
        raise DataError(
            f"the pretrained weights of {arch} cannot be downloaded ({error}). Download {where} elsewhere and write "
            "model.weights=FILE; model.weights=none starts from random weights."
        ) from error


def read(file: Path) -> Mapping[str, Tensor]:
    """The state dict in a file of torch.save or safetensors; no code in it is run."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files can raise nearly anything
        reason = str(error).partition("\n")[0] if file.is_file() else "there is no such file"
        raise DataError(
            f"model.weights={file}: {reason[:300]}. Expected a state dict, saved by torch.save or as safetensors."
        ) from error
    if isinstance(state, Mapping):
        state = state.get("state_dict", state.get("model", state))
    if not (isinstance(state, Mapping) and all(isinstance(tensor, Tensor) for tensor in state.values())):
        raise DataError(f"model.weights={file}: expected a state dict, a mapping of names to tensors")
    return state
