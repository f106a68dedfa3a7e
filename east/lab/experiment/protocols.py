"""How a protocol searches: which seeds, how many rounds, how many trainings in total."""

from east.lab.settings.settings import SEARCH_SEED, Settings


def search_seeds(settings: Settings) -> list[int]:
    """One seed per point; if all losses should train equally often, one per cooling rate for those without any.

    A protocol without annealing searches no cooling rate.
    """
    searches_r = settings.protocol.annealing != "none"
    repeated = settings.search.equal_budget and not settings.loss.anneals and searches_r
    return [SEARCH_SEED + k for k in range(len(settings.axes.r) if repeated else 1)]


def rounds(settings: Settings) -> list[tuple[int | None, int]]:
    """Rounds of the search: the epochs that each point may train (None: all), and how many points take part."""
    search = settings.search
    if not settings.searched:
        return []
    points = len(settings.grid())
    if search.name == "grid":
        return [(None, points)]
    counts = [max(1, points // search.factor**k) for k in range(search.rounds + 1)]
    epochs = [search.epochs * search.factor**k for k in range(search.rounds)]
    shortened = sum(count < settings.protocol.max_epochs for count in epochs)  # the next round is full training
    return [*zip(epochs[:shortened], counts, strict=False), (None, counts[shortened])]


def searches(settings: Settings) -> int:
    """Trainings of the search."""
    return sum(count for _, count in rounds(settings)) * len(search_seeds(settings))


def planned(settings: Settings) -> int:
    """Trainings of a run, search included."""
    return searches(settings) + settings.trial_count


def whole_searches(settings: Settings, epochs: float) -> float:
    """Trainings of a search with one seed, counted in full ones of `epochs` epochs: rounds of halving are shorter."""
    return sum(count * min((limit or epochs) / epochs, 1) for limit, count in rounds(settings))
