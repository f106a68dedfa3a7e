"""How a protocol searches: which seeds, how many rounds, how many trainings in total."""

from east.settings.settings import SEARCH_SEED, Settings


def search_seeds(settings: Settings) -> list[int]:
    """One seed per point; two for a loss without a cooling rate, if all losses should train equally often."""
    twice = settings.search.equal_budget and not settings.loss.anneals
    return [SEARCH_SEED, SEARCH_SEED + 1] if twice else [SEARCH_SEED]


def rounds(settings: Settings) -> list[tuple[int | None, int]]:
    """Rounds of the search: the epochs that each point may train (None: all), and how many points take part."""
    search = settings.search
    if not settings.searched:
        return []
    points = len(settings.grid())
    if search.name == "grid":
        return [(None, points)]
    counts = [max(1, points // search.factor**k) for k in range(search.rounds + 1)]
    shortened = [(search.epochs * search.factor**k, counts[k]) for k in range(search.rounds)]
    return [*shortened, (None, counts[-1])]


def searches(settings: Settings) -> int:
    """Trainings of the search."""
    return sum(count for _, count in rounds(settings)) * len(search_seeds(settings))


def planned(settings: Settings) -> int:
    """Trainings of a run, search included."""
    return searches(settings) + settings.trial_count
