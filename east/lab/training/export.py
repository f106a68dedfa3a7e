"""Export of trained networks as ONNX, for runtimes without PyTorch; a JSON file beside it has the steps around them.

    east.export("results/models/csv-f1-0a1b2c3d4e5f-seed0", "people.onnx")     # and people.onnx.json

The graph takes encoded, scaled inputs [n, ...] (float32) and returns `logits` and `probabilities` [n, d]. In the JSON
file, `encoding` turns the columns of a row into features, `scaling` turns those into inputs,
(features / divisor - mean) / std in float64, and `rule` turns probabilities into one of `classes`; null means argmax.
"""

import copy
import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from east.choices import ConfigError, install_hint
from east.lab.files import write_atomically
from east.lab.training import saved
from east.lab.training.classical import Fitted
from east.lab.training.ensemble import Mixture
from east.losses.inputs import two_or_more

if TYPE_CHECKING:
    from east.estimator import EASTClassifier

FORMAT = 1
INPUT, LOGITS, PROBABILITIES = "inputs", "logits", "probabilities"


def export(model: "saved.Model | EASTClassifier | str | Path", path: str | Path) -> Path:
    """Write a network as ONNX to `path`, which must end in .onnx, and its description to the same path plus .json.

    model: a saved model, its folder, or a fitted EASTClassifier. Returns the path of the ONNX file.
    """
    target = Path(path).expanduser()
    if target.suffix != ".onnx":
        raise ConfigError(f"expected a file that ends in .onnx, got {str(path)!r}")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed: {install_hint('onnx')}")
    source = saved.load(model) if isinstance(model, str | Path) else model
    source = source if isinstance(source, saved.Model) or not hasattr(source, "to_model") else source.to_model()
    if not isinstance(source, saved.Model):
        raise ConfigError(f"expected a saved model, its folder or a fitted EASTClassifier, got {type(model).__name__}")
    others = [type(module.estimator).__name__ for module in source.net.modules() if isinstance(module, Fitted)]
    if others or source.about.kind == "graph":
        got = ", ".join(sorted(set(others))) or type(source.net).__name__
        raise ConfigError(f"expected networks for tables or images (MLP, Darknet or your own), got {got}")
    content = onnx_bytes(source.net, source.about.inputs_shape)
    about = json.dumps(description(source, target.name), indent=1) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    write_atomically(beside(target), about)
    return target


def beside(target: Path) -> Path:
    """The JSON file of an ONNX file; not model.json, the name of another file in the folder of a saved model."""
    return target.with_name(f"{target.name}.json")


class Network(nn.Module):
    """What is exported: scaled inputs to logits and probabilities [n, d], d >= 2. Of an ensemble, logits are log p."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.net(inputs)
        if isinstance(self.net, Mixture):
            return outputs.clamp_min(torch.finfo(outputs.dtype).tiny).log(), outputs
        logits = two_or_more(outputs)
        return logits, logits.softmax(-1)


def onnx_bytes(net: nn.Module, inputs_shape: list[int]) -> bytes:
    """The network as an ONNX graph for any number of rows, weights included."""
    network = Network(copy.deepcopy(net).cpu()).eval()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it remarks on its own internals, also by warnings
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            network,
            (torch.zeros(2, *inputs_shape),),
            input_names=[INPUT],
            output_names=[LOGITS, PROBABILITIES],
            dynamic_shapes={"inputs": {0: torch.export.Dim("n")}},
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # only dynamo=False returns None
    return program.model_proto.SerializeToString()


def description(model: saved.Model, network: str) -> dict[str, object]:
    """What a program needs besides the ONNX file `network` to get from raw rows to a class."""
    about, classes = model.about, len(model.classes)
    return {
        "format": FORMAT,
        "network": network,
        "kind": about.kind,
        "input": {"name": INPUT, "type": "float32", "shape": ["n", *about.inputs_shape]},
        "outputs": {name: {"type": "float32", "shape": ["n", classes]} for name in (LOGITS, PROBABILITIES)},
        "encoding": about.encoding,
        "scaling": {
            "divisor": 255 if about.kind == "image" else 1,
            "mean": model.mean.tolist(),
            "std": model.std.tolist(),
        },
        "classes": model.classes,
        "positive": about.positive,
        "decision": about.decision,
        "rule": about.rule,
    }
