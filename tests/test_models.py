"""Architectures against their published sizes; stacked networks against the ordinary modules they hold."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn

from east.lab import models
from east.lab.models import MLP, Stack, darknet
from east.lab.models.darknet import dense_convolution
from east.lab.models.mlp import Dropout, StackedMLP
from east.lab.settings.settings import ModelSection


def build(section, *arguments, **options):
    return models.build(ModelSection(**section), *arguments, **options)


class OwnNet(nn.Module):
    """A user's module, for model=custom."""

    def __init__(self, inputs_shape, outputs, hidden=7, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs_shape[0], hidden), nn.Dropout(dropout), nn.Linear(hidden, outputs))

    def forward(self, x):
        return self.net(x)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def convolutions(module):
    return [m for m in module.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize(
    "name, outputs, millions, layers",
    [("darknet19", 10, 19.83, 19), ("darknet19", 257, 20.08, 19), ("tiny_darknet", 10, 0.91, 16)],
)
def test_darknets_have_their_published_size(name, outputs, millions, layers):
    net = build({"name": name}, (3, 32, 32), outputs)
    assert parameters(net) / 1e6 == pytest.approx(millions, abs=0.005)
    assert len(convolutions(net)) == layers


@pytest.mark.parametrize("pools, side", [(None, 1), (3, 4), (0, 32)])
def test_width_scales_channels_and_fewer_pools_leave_a_larger_map(pools, side):
    net = build({"name": "darknet19", "width": 0.25, "pools": pools}, (3, 32, 32), 10)
    assert [c.out_channels for c in convolutions(net)][:3] == [8, 16, 32]
    assert net.body(torch.zeros(2, 3, 32, 32)).shape[-2:] == (side, side)
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    "model, side",
    [
        ({"name": "darknet19", "width": 0.25}, 64),
        ({"name": "darknet19", "width": 0.1, "pools": 4}, 16),
        ({"name": "tiny_darknet", "width": 0.5}, 16),
    ],
)
def test_dense_products_on_small_maps_change_neither_logits_nor_gradients(model, side, monkeypatch):
    torch.manual_seed(0)
    net = build(model, (3, side, side), 5).double()
    images, labels = torch.randn(32, 3, side, side, dtype=torch.float64), torch.randint(0, 5, (32,))

    def logits_and_gradients():
        logits = net(images)
        return [logits, *torch.autograd.grad(nn.functional.cross_entropy(logits, labels), net.parameters())]

    dense = logits_and_gradients()
    monkeypatch.setattr(darknet.Convolution3x3, "forward", nn.Conv2d.forward)
    errors = [float(((a - b).norm() / b.norm()).detach()) for a, b in zip(dense, logits_and_gradients(), strict=True)]
    assert 0 < max(errors) <= 1e-12, "0: there is no small map"


@pytest.mark.parametrize("side", [1, 2])
def test_dense_convolutions_have_the_right_gradient(side):
    images = torch.randn(3, 4, side, side, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(dense_convolution(images, weight), nn.functional.conv2d(images, weight, padding=1))
    assert torch.autograd.gradcheck(dense_convolution, (images, weight))


def test_mlps_have_the_papers_layers():
    east = build({"name": "mlp", "hidden": [512, 256, 128], "outputs": None}, (6,), 2)
    assert [(layer.in_features, layer.out_features) for layer in east.layers] == [
        (6, 512), (512, 256), (256, 128), (128, 2)
    ]  # fmt: skip
    btg = build({"name": "mlp_btg", "hidden": [32, 16], "outputs": 1}, (22,), 2)
    assert btg(torch.zeros(5, 22)).shape == (5, 1)


def test_the_gnn_depends_neither_on_the_order_of_people_nor_on_where_they_stand():
    torch.manual_seed(0)
    net = build({"name": "gnn", "hidden": 8, "outputs": 1}, (4, 4), 2)
    people, order = torch.randn(3, 4, 4), torch.tensor([2, 0, 3, 1])
    pairs = torch.triu_indices(4, 4, offset=1).T.tolist()
    plain, permuted = net(people), net(people[:, order])
    assert plain.shape == (3, 6, 1)
    places = [pairs.index(sorted((int(order[i]), int(order[j])))) for i, j in pairs]
    torch.testing.assert_close(permuted, plain[:, places])
    moved = people + torch.tensor([5.0, -3.0, 0.0, 0.0])
    torch.testing.assert_close(plain, net(moved), atol=1e-4, rtol=1e-4)


FILES = sorted((Path(__file__).parent.parent / "conf/model").glob("*.yaml"))
SHAPES = {"backbone": (3, 32, 32), "darknet19": (3, 32, 32), "tiny_darknet": (3, 32, 32), "gnn": (6, 4)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_model_config_builds(file):
    config = OmegaConf.to_container(OmegaConf.load(file))
    assert config["name"] == file.stem
    if config["name"] == "custom":
        config["target"] = f"{__name__}.OwnNet"
    if config["name"] == "backbone":
        config |= {"weights": "none", "size": 32}
    shape = SHAPES.get(file.stem, (6,))
    logits = build(config, shape, 2)(torch.zeros(2, *shape))
    assert logits.shape[-1] == (config["outputs"] or 2)


def test_a_custom_module_gets_shape_outputs_options_and_dropout():
    net = build({"name": "custom", "target": f"{__name__}.OwnNet", "parameters": {"hidden": 5}}, (3,), 4, dropout=0.3)
    assert net.net[0].out_features == 5
    assert net.net[1].p == 0.3
    assert net(torch.zeros(2, 3)).shape == (2, 4)


@pytest.mark.parametrize(
    "config, shape, message",
    [
        ({"name": "darknet"}, (3, 32, 32), "did you mean 'darknet19'"),
        ({"name": "darknet19"}, (6,), r"expects images \[3, height, width\], got samples of shape \[6\]"),
        ({"name": "tiny_darknet", "pools": 9}, (3, 32, 32), "expected 0 to 4, or null for all, got 9"),
        ({"name": "gnn"}, (6,), r"expects graphs \[nodes, features\]"),
        ({"name": "custom", "target": "nowhere.Net"}, (6,), "cannot import 'nowhere.Net'"),
        ({"name": "custom", "target": "Net"}, (6,), "expected package.module.name"),
    ],
)
def test_bad_models_are_refused_with_the_choices(config, shape, message):
    with pytest.raises(ValueError, match=message):
        build(config, shape, 2)


def test_a_stack_computes_what_its_modules_compute():
    nets = [MLP(6, [16, 8], 3) for _ in range(4)]
    inputs = torch.randn(4, 10, 6)
    expected = torch.stack([net(x) for net, x in zip(nets, inputs, strict=True)])
    stack = Stack(nets)
    torch.testing.assert_close(stack(inputs), expected)
    values = stack(inputs, training=True).square().sum((1, 2))
    expected.square().sum().backward()
    theirs = [torch.cat([parameter.grad.flatten() for parameter in net.parameters()]) for net in nets]
    stack.backward(values)
    torch.testing.assert_close(stack.gradient, torch.stack(theirs))


@pytest.mark.parametrize("rates", [None, [0.5, 0.25]])
@pytest.mark.parametrize("sizes", [[3, 5, 4, 2], [5, 4, 1], [3, 2]])
def test_stacked_perceptrons_have_the_right_gradient(rates, sizes):
    """Against autograd through the same network of ordinary layers; also after a batch of another size."""
    torch.manual_seed(0)
    weights = torch.randn(2, sum(a * b + b for a, b in pairwise(sizes)), dtype=torch.float64)
    stacked = StackedMLP(sizes)
    gradient = torch.empty_like(weights)
    stacked.bind(weights, gradient)
    dropout = rates and Dropout(torch.tensor(rates, dtype=torch.float64), sizes[1:-1], 7)
    for rows in (7, 4, 7):
        inputs, to_logits = (torch.randn(2, rows, size, dtype=torch.float64) for size in (sizes[0], sizes[-1]))
        masks = dropout.masks(torch.tensor([1, 2]), 3, rows) if dropout else None
        leaf = weights.clone().requires_grad_()
        expected = unstacked(inputs, leaf, sizes, masks and masks.kept, rates)
        torch.testing.assert_close(stacked.forward(inputs, masks), expected)
        (theirs,) = torch.autograd.grad(expected, leaf, to_logits)
        stacked.backward(to_logits)
        torch.testing.assert_close(gradient, theirs)


def unstacked(inputs, weights, sizes, kept, rates):
    """Logits [P, n, d] by ordinary linear layers, one trial after the other."""
    logits = []
    for p, (x, row) in enumerate(zip(inputs, weights, strict=True)):
        pieces = row.split([count for a, b in pairwise(sizes) for count in (a * b, b)])
        for k, (a, b) in enumerate(pairwise(sizes)):
            x = F.linear(x, pieces[2 * k].view(b, a), pieces[2 * k + 1])
            if k < len(sizes) - 2:
                x = x.relu() if kept is None else x.relu() * kept[k][p] / (1 - rates[p])
        logits.append(x)
    return torch.stack(logits)


def test_a_stack_gives_back_the_state_of_an_ordinary_module():
    nets = [MLP(6, [16, 8], 3) for _ in range(2)]
    states = [{k: v.clone() for k, v in net.state_dict().items()} for net in nets]
    stack = Stack(nets)
    for row, state in zip(stack.weights.clone(), states, strict=True):
        returned = stack.state_dict(row)
        assert returned.keys() == state.keys()
        assert all(torch.equal(returned[k], v) for k, v in state.items())


def test_batch_norm_statistics_and_counts_live_in_the_stack():
    net = build({"name": "tiny_darknet", "width": 0.1}, (3, 16, 16), 2)
    stack = Stack([net])
    images = torch.rand(1, 8, 3, 16, 16)
    before = stack.weights[:, stack.learned :].clone()
    for _ in range(3):
        loss = stack(images, training=True).square().sum()
    torch.autograd.grad(loss, stack.leaves)  # despite the forward pass's new statistics
    assert not torch.equal(before, stack.weights[:, stack.learned :])
    snapshot, expected = stack.weights[0].clone(), stack(images)[0]
    stack(images, training=True)
    trained = build({"name": "tiny_darknet", "width": 0.1}, (3, 16, 16), 2)
    trained.load_state_dict(stack.state_dict(snapshot))
    torch.testing.assert_close(trained.eval()(images[0]), expected)
    assert {int(value) for name, value in trained.state_dict().items() if "num_batches" in name} == {3}


def test_other_modules_train_only_as_populations_of_one():
    with pytest.raises(ValueError, match="expected a population of one, got 2"):
        Stack([OwnNet((3,), 2), OwnNet((3,), 2)])


class Tanh(MLP):
    """A user's subclass of MLP with a forward pass of its own."""

    def forward(self, x):
        return super().forward(x).tanh()


def test_a_subclass_of_mlp_keeps_its_own_forward_pass():
    net, inputs = Tanh(4, [3], 2), torch.randn(5, 4)
    torch.testing.assert_close(Stack([net])(inputs[None])[0], net(inputs))


def drawn(keys, step, rates, rows, widths):
    """The masks of a step, copied: the next step overwrites them."""
    return [kept.clone() for kept in Dropout(rates, widths, rows).masks(keys, step, rows).kept]


def test_dropout_rates_are_exact_for_quarters_and_rounded_to_the_masks_resolution():
    keys, rates = torch.tensor([7, -(2**61), 12345, 1]), torch.tensor([0.25, 0.5, 0.0, 0.1])
    masks = torch.cat([m.flatten(1) for s in range(20) for m in drawn(keys, s, rates, 1000, [50, 30])], dim=1)
    for mask, rate in zip(masks, (0.25, 0.5, 0.0, 26 / 256), strict=True):
        assert mask.max() == 1
        assert abs(float((mask == 0).float().mean()) - rate) <= 5 * (rate * (1 - rate) / masks.shape[1]) ** 0.5
        neighbours = float(((mask[1:] == 0) & (mask[:-1] == 0)).float().mean())
        assert neighbours == pytest.approx(rate**2, abs=0.005)
    assert Dropout(rates, [64], 1).scale.flatten().tolist() == pytest.approx([4 / 3, 2, 1, 256 / 230])


def test_masks_are_a_function_of_key_and_step():
    keys, rates = torch.tensor([3, 4, 5]), torch.tensor([0.25, 0.5, 0.1])
    company, other = (drawn(keys, step, rates, 32, [16, 8]) for step in (9, 10))
    alone = drawn(keys[1:2], 9, rates[1:2], 32, [16, 8])
    assert all(torch.equal(a[0], c[1]) for a, c in zip(alone, company, strict=True))
    dropout = Dropout(rates, [16, 8], 32)
    *_, again = (dropout.masks(keys, step, 32).kept for step in (8, 9))  # whatever was drawn before it
    assert all(torch.equal(a, c) for a, c in zip(again, company, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(company, other, strict=True))
    half, shifted = (drawn(keys[k : k + 1], 9, torch.tensor([0.5]), 512, [64])[0] for k in (1, 2))
    assert float((half == shifted).float().mean()) == pytest.approx(0.5, abs=0.02)


def test_masks_match_splitmix64():
    """The generator's published definition, in Python's integers."""
    key, step, rows, width = 12345, 7, 3, 8
    bits, words = (1 << 64) - 1, []
    for k in range(rows):
        z = (((step << 32) + k) * 0x9E3779B97F4A7C15 + key) & bits
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
        words.append((z ^ (z >> 31)).to_bytes(8, "little"))
    expected = torch.tensor([[byte >= 64 for byte in word] for word in words])
    (mask,) = drawn(torch.tensor([key]), step, torch.tensor([0.25]), rows, [width])
    assert torch.equal(mask[0].bool(), expected)
