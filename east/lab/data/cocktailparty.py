"""CocktailParty: 320 frames of six people at a party; which pairs stand in the same group?"""

from dataclasses import replace
from itertools import combinations

import numpy as np
import torch

from east.choices import choose
from east.lab.data.common import DataError, Graphs, Table
from east.lab.data.sources import Dataset, File, Root, fetch

DANTE = "https://raw.githubusercontent.com/mswoff/DANTE/master/datasets/cocktail_party/DS_utils/"
CHECKSUMS = {
    "features.txt": "sha256:05ff8cc6850b285af809b4d7ffbdb5b22be7e8b52fc1c488cc9e733bd5b71586",
    "group_names.txt": "sha256:cbdf642f4588a61c09e1ce87d6b76270da8511fc9a3bf2bee58851a7dfdf6a62",
}
FILES = [File(f"cocktailparty/{name}", checksum, f"{DANTE}{name}") for name, checksum in CHECKSUMS.items()]
SOURCE = f"{DANTE} (DANTE's copy: the original's positions, other angles)"
PEOPLE = 6
PAIRS = np.array(list(combinations(range(PEOPLE), 2)))  # [15, 2]


def cocktailparty(root: Root = None, *, split: str = "pair") -> Table:
    """4,800 pairs, 22 features; positive = NOT in the same group (30.29 %), as in Bridging the Gap's code.

    The origin is the pair's midpoint and the x-axis runs from its first to its second person, who are swapped at
    random. Each person is x, y, cos, sin; the pair's y is always 0 and dropped; the other four are sorted by name.
    split=pair spreads the pairs of a frame over train and test, as the papers do; frame keeps them together.
    """
    choose("split of cocktailparty", split, ("pair", "frame"))
    positions, angles, together, path = scenes(root)
    frames = len(positions)
    swap = np.random.RandomState(0).rand(frames, len(PAIRS)) < 0.5
    pairs = np.where(swap[..., None], PAIRS[:, ::-1], PAIRS)  # [frames, 15, 2]
    others = np.array([[person for person in range(PEOPLE) if person not in pair] for pair in PAIRS.tolist()])
    order = np.concatenate([pairs, np.broadcast_to(others, (frames, *others.shape))], axis=-1)  # [frames, 15, 6]
    frame = np.arange(frames)[:, None, None]
    points, headings = positions[frame, order], angles[frame, order]  # [frames, 15, 6, 2], [frames, 15, 6]
    axis = points[:, :, 1] - points[:, :, 0]
    turn = np.arctan2(axis[..., 1], axis[..., 0])[..., None]
    x, y = np.moveaxis(points - points[:, :, :2].mean(2, keepdims=True), -1, 0)
    along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    people = np.stack([along, across, np.cos(headings - turn), np.sin(headings - turn)], axis=-1)
    names = [f"{person}_{value}" for person in ("first", "second", *"abcd") for value in ("x", "y", "cos", "sin")]
    kept = [k for k, name in enumerate(names) if name not in ("first_y", "second_y")]
    return Table(
        features=torch.tensor(people.reshape(-1, len(names))[:, kept], dtype=torch.float32),
        labels=torch.tensor(~together.reshape(-1), dtype=torch.int64),
        classes=("together", "apart"),
        name="cocktailparty",
        positive=1,
        groups=torch.arange(frames).repeat_interleave(len(PAIRS)) if split == "frame" else None,
        columns=tuple(names[k] for k in kept),
        source=SOURCE,
        path=path,
    ).expect(rows=4800, shape=(22,), positives=1454)


def cocktailparty_graph(root: Root = None) -> Graphs:
    """320 complete graphs; node = x, y from the frame's centre, cos, sin; positive = in the same group (69.71 %).

    Labels [320, 15] follow `torch.triu_indices(6, 6, offset=1)`. Note that the positive class is the opposite of
    cocktailparty's (Table 3 of BtG).
    """
    positions, angles, together, path = scenes(root)
    centred = positions - positions.mean(1, keepdims=True)
    nodes = np.concatenate([centred, np.stack([np.cos(angles), np.sin(angles)], axis=-1)], axis=-1)
    return Graphs(
        nodes=torch.tensor(nodes, dtype=torch.float32),
        labels=torch.tensor(together, dtype=torch.int64),
        classes=("apart", "together"),
        name="cocktailparty_graph",
        positive=1,
        source=SOURCE,
        path=path,
    ).expect(rows=320, shape=(PEOPLE, 4), positives=3346)


def scenes(root: Root) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Positions [frames, 6, 2] in metres, angles [frames, 6], together [frames, 15], and the folder."""
    path, group_path = (fetch(file, root=root) for file in FILES)
    frames, groups = ([line.split() for line in file.read_text().splitlines()] for file in (path, group_path))
    if [frame[0] for frame in frames] != [group[0] for group in groups]:
        raise DataError("cocktailparty: features.txt and group_names.txt do not list the same frames.")
    values = np.array([frame[1:] for frame in frames]).reshape(len(frames), PEOPLE, 4)  # name, x, y, angle
    numbers = values[..., 1:].astype(float)
    # `< a b > < c > …`: the brackets before a person number the group
    group_of = [[words[: words.index(p)].count("<") for p in values[k, :, 0]] for k, words in enumerate(groups)]
    first, second = np.array(group_of)[:, PAIRS].transpose(2, 0, 1)
    return numbers[..., :2], numbers[..., 2], first == second, str(path.parent)


ABOUT = Dataset(
    load=cocktailparty,
    kind="table",
    about="4,800 rows, 22 features, 1,454 positive (30.29 %)",
    licence="research use",
    citation="G. Zen et al.: Space speaks: towards socially and personality aware visual surveillance. ACM MPVA, 2010",
    stored=(FILES[1].path,),
)
DATASETS = {
    "cocktailparty": ABOUT,
    "cocktailparty_graph": replace(
        ABOUT,
        load=cocktailparty_graph,
        kind="graph",
        about="320 graphs of 6 people, 3,346 of 4,800 pairs positive (69.71 %)",
    ),
}
