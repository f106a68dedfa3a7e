"""Two gloo processes against one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from east import MetricCrossEntropy, MetricLoss
from east.losses.metric_cross_entropy import FORMS

SIZES = [(12, 12), (17, 3)]  # samples per rank, of two batches
METRIC_LOSSES = {
    "f1": {},
    "mcc": {},
    "quadratic_kappa": {},  # needs the matrix
    "ignoring": {"metric": "f1", "threshold": [0.2, 0.5], "absent": "ignore"},
    "sigmoid": {"metric": "accuracy", "step": "sigmoid", "threshold": 0.5},
}
for average in ("macro", "micro", "weighted", "samples"):
    METRIC_LOSSES[f"labels {average}"] = {"metric": "f1", "multilabel": True, "average": average}
RUNNING = {f"running {m} {f}": {"metric": m, "form": f} for m in ("f1", "gmean", "quadratic_kappa") for f in FORMS}


def built(name, **options):
    kind = MetricCrossEntropy if name in RUNNING else MetricLoss
    return kind(**{"metric": name} | (METRIC_LOSSES | RUNNING)[name] | options)


def whole_batch(n):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    # The first class is only on the first rank, so that no rank alone knows its score.
    return x, torch.cat((torch.zeros(n // 4, dtype=torch.long), 1 + torch.arange(n - n // 4) % 3)), torch.rand(n)


def net():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def results(model, loss, x, y, weights):
    """The loss, the gradients of the model, and the counts that the loss carries to the next batch."""
    model.zero_grad()
    value = loss(model(x), nn.functional.one_hot(y, 4) if getattr(loss, "multilabel", False) else y, weights)
    value.backward()
    counts = [loss.counts.clone()] if isinstance(loss, MetricCrossEntropy) else []
    return [value.detach(), *(p.grad.clone() for p in model.parameters()), *counts]


def one_after_another(model, loss, batches):
    return [results(model, loss, *batch) for batch in batches]


def on_their_own(name, model, x, y, weights):
    """What needs no gradient, and so no other rank's counts."""
    logits, loss = model(x).detach(), built(name)
    with torch.no_grad():
        first = loss(logits, y, weights)
    return [first, loss.eval()(logits, y, weights), built(name, gather=False)(logits, y, weights)]


def ignored(rank, x, y, weights):
    """A batch whose labels count on the first rank alone."""
    return x, y if rank == 0 else torch.full_like(y, -100), weights


def worker(rank, path, batches, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model, mine = DistributedDataParallel(net()), parts(batches, rank)
    found = {name: one_after_another(model, built(name), mine) for name in (*METRIC_LOSSES, *RUNNING)}
    for name in METRIC_LOSSES:
        if "labels" not in name:
            found[name, "alone"] = [on_their_own(name, model, *batch) for batch in mine]
            found[name, "ignored"] = results(model, built(name), *ignored(rank, *mine[0]))
            found[name, "ignored alone"] = results(net(), built(name), *ignored(rank, *mine[0]))
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def parts(batches, rank):
    return [[t.split(sizes)[rank] for t in batch] for sizes, batch in zip(SIZES, batches, strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder, batches = tmp_path_factory.mktemp("ranks"), [whole_batch(sum(sizes)) for sizes in SIZES]
    mp.spawn(worker, (folder / "store", batches, folder), nprocs=2)
    return batches, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METRIC_LOSSES, *RUNNING])
def test_two_ranks_match_one_process(ranks, name):
    batches, found = ranks
    whole = one_after_another(net(), built(name), batches)
    for rank in range(2):
        torch.testing.assert_close(found[rank][name], whole)
        if (name, "alone") in found[rank]:
            expected = [on_their_own(name, net(), *batch) for batch in parts(batches, rank)]
            torch.testing.assert_close(found[rank][name, "alone"], expected)
            apart = zip(whole, expected, strict=True)
            assert not any(torch.equal(first, counted) for (first, *_), (counted, *_) in apart)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METRIC_LOSSES if "labels" not in name])
def test_a_rank_with_only_ignored_labels_takes_part_with_a_loss_of_0(ranks, name):
    """Otherwise the other rank would wait for its counts. After DDP's averaging the gradient is the other rank's."""
    batches, (first, second) = ranks
    value, *gradients = results(net(), built(name), *parts(batches, 0)[0])
    for found in (first, second):
        torch.testing.assert_close(found[name, "ignored"][1:], gradients)
    torch.testing.assert_close(first[name, "ignored"][0], value)
    assert second[name, "ignored"][0] == 0
    assert all((gradient == 0).all() for gradient in second[name, "ignored alone"][1:])
