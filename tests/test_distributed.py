"""Two gloo processes against one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from east import MetricCrossEntropy, MetricLoss
from east.losses.metric_cross_entropy import FORMS

LABEL_AVERAGES = ("macro", "micro", "weighted", "samples")
CASES = [(12, 12), (17, 3)]  # samples per rank
LOSSES = [
    ("f1", {}),
    ("mcc", {}),
    ("quadratic_kappa", {}),  # needs the matrix
    ("f1", {"threshold": [0.2, 0.5], "absent": "ignore"}),
    ("accuracy", {"step": "sigmoid", "threshold": 0.5}),
]
RUNNING = [(metric, form) for metric in ("f1", "gmean", "quadratic_kappa") for form in FORMS]


def whole_batch(n):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    # The first class is only on the first rank, so that no rank alone knows its score.
    return x, torch.cat((torch.zeros(n // 4, dtype=torch.long), 1 + torch.arange(n - n // 4) % 3)), torch.rand(n)


def net():
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def results(model, loss, x, y, weights):
    model.zero_grad()
    value = loss(model(x), y, weights)
    value.backward()
    return [value.detach(), *(p.grad.clone() for p in model.parameters())]


def series(model, loss, batches):
    """The results of one batch after another, and the running counts after each."""
    return [each for batch in batches for each in (*results(model, loss, *batch), loss.counts.clone())]


def worker(rank, path, batches, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = DistributedDataParallel(net())
    found = {}
    for case, (sizes, batch) in enumerate(zip(CASES, batches, strict=True)):
        x, *rest = (t.split(sizes)[rank] for t in batch)
        for k, (metric, parameters) in enumerate(LOSSES):
            loss = MetricLoss(metric, **parameters)
            found[case, k] = results(model, loss, x, *rest)
            logits = model(x).detach()
            with torch.no_grad():
                found[case, k, "no grad"] = loss(logits, *rest)
            found[case, k, "eval"] = loss.eval()(logits, *rest)
            found[case, k, "gather=False"] = MetricLoss(metric, gather=False, **parameters)(logits, *rest)
    x, y, weights = (t.split(CASES[0])[rank] for t in batches[0])
    labels = y if rank == 0 else torch.full_like(y, -100)
    for k, (metric, parameters) in enumerate(LOSSES):
        found["ignored", k] = results(model, MetricLoss(metric, **parameters), x, labels, weights)
        local = net()
        value = MetricLoss(metric, **parameters)(local(x), labels, weights)
        found["ignored", k, "alone"] = [value.detach(), *torch.autograd.grad(value, local.parameters())]
    for case, (sizes, batch) in enumerate(zip(CASES, batches, strict=True)):
        x, y, weights = (t.split(sizes)[rank] for t in batch)
        for average in LABEL_AVERAGES:
            loss = MetricLoss("f1", multilabel=True, average=average)
            found["multilabel", case, average] = results(model, loss, x, onehot(y), weights)
    mine = [[t.split(sizes)[rank] for t in batch] for sizes, batch in zip(CASES, batches, strict=True)]
    for k, (metric, form) in enumerate(RUNNING):
        found["running", k] = series(model, MetricCrossEntropy(metric, form=form), mine)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    batches = [whole_batch(sum(sizes)) for sizes in CASES]
    mp.spawn(worker, (folder / "store", batches, folder), nprocs=2)
    return batches, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("k", range(len(LOSSES)), ids=[metric for metric, _ in LOSSES])
@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_two_ranks_match_one_process(ranks, case, k):
    batches, found = ranks
    metric, parameters = LOSSES[k]
    loss, model = MetricLoss(metric, **parameters), net()
    whole = results(model, loss, *batches[case])
    for rank in range(2):
        torch.testing.assert_close(found[rank][case, k], whole)
        # Counts are summed only if a gradient is needed; otherwise every rank has its own.
        x, y, weights = (t.split(CASES[case])[rank] for t in batches[case])
        alone = loss(model(x), y, weights)
        for situation in ("no grad", "eval", "gather=False"):
            torch.testing.assert_close(found[rank][case, k, situation], alone)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(len(LOSSES)), ids=[metric for metric, _ in LOSSES])
def test_a_rank_with_only_ignored_labels_takes_part_with_a_loss_of_0(ranks, k):
    """Otherwise the other rank would wait for its counts. After DDP's averaging the gradient is the other rank's."""
    batches, found = ranks
    metric, parameters = LOSSES[k]
    x, y, weights = (t.split(CASES[0])[0] for t in batches[0])
    value, *gradients = results(net(), MetricLoss(metric, **parameters), x, y, weights)
    for rank in range(2):
        torch.testing.assert_close(found[rank]["ignored", k][1:], gradients)
    torch.testing.assert_close(found[0]["ignored", k][0], value)
    assert found[1]["ignored", k][0] == 0
    assert all((gradient == 0).all() for gradient in found[1]["ignored", k, "alone"])


@pytest.mark.slow
@pytest.mark.parametrize("average", LABEL_AVERAGES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_two_multilabel_ranks_match_one_process(ranks, case, average):
    batches, found = ranks
    x, y, weights = batches[case]
    loss = MetricLoss("f1", multilabel=True, average=average)
    whole = results(net(), loss, x, onehot(y), weights)
    for rank in range(2):
        torch.testing.assert_close(found[rank]["multilabel", case, average], whole)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(len(RUNNING)), ids=map(str, RUNNING))
def test_running_counts_of_two_ranks_match_one_process(ranks, k):
    batches, found = ranks
    metric, form = RUNNING[k]
    whole = series(net(), MetricCrossEntropy(metric, form=form), batches)
    for rank in range(2):
        torch.testing.assert_close(found[rank]["running", k], whole)


def onehot(labels):
    return nn.functional.one_hot(labels, 4)
