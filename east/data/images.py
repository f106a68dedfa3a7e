"""Your own images: one folder per class."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from east.choices import ConfigError, choose
from east.data.common import DataError, Images, digest, fingerprint, listed
from east.data.sources import Dataset, decoded

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"}


def images(root=None, *, path: str | None = None, size: int = 64, positive: str | None = None) -> Images:
    """path/<class>/<any name>.jpg or png …; each image is scaled to `size` on its shorter side and cropped centrally.

    Classes are the folders' names in alphabetical order; of two, the positive one (default: the rarer) comes second.
    """
    if path is None:
        raise DataError("dataset=images needs dataset.path=FOLDER, a folder with one folder of images per class.")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(f"dataset=images: {folder} is not a folder. Expected one with a folder of images per class.")
    files = {
        place.name: sorted(file for file in place.rglob("*") if file.suffix.lower() in SUFFIXES)
        for place in sorted(folder.iterdir())
        if place.is_dir() and not place.name.startswith(".")
    }
    empty = [name for name in files if not files[name]]
    if empty or len(files) < 2:
        got = f"none in {', '.join(empty)}" if empty else f"found {len(files)} ({', '.join(files) or 'none'})"
        raise DataError(f"dataset=images: expected two or more folders in {folder}, with images in each; {got}.")
    classes = list(files)
    if positive is not None:
        choose("class", positive, classes)
    if len(classes) == 2:
        positive = positive or min(classes, key=lambda name: len(files[name]))
        classes.sort(key=lambda name: name == positive)
    return from_files("images", folder, {name: files[name] for name in classes}, size, positive)


def from_files(
    name: str, folder: Path, files: dict[str, list[Path]], size: int, positive: str | None = None, source: str = ""
) -> Images:
    """Images of the classes `files`, decoded once for every size and state of the folder."""
    if not isinstance(size, int) or size < 8:
        raise ConfigError(f"{name}: size must be a whole number of at least 8 pixels, got {size!r}")
    classes = tuple(files)
    paths = [path for part in files.values() for path in part]
    state = hashlib.sha256(f"{folder.resolve()} {size}".encode())
    for path in paths:
        stat = path.stat()
        state.update(f"{path.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    arrays, digests, _ = decoded(f"{name}-{size}-{state.hexdigest()[:16]}", lambda: {"pixels": decode(paths, size)})
    labels = np.repeat(np.arange(len(classes)), [len(part) for part in files.values()])
    return Images(
        pixels=torch.from_numpy(arrays["pixels"]),
        labels=torch.from_numpy(labels),
        classes=classes,
        name=name,
        positive=None if positive is None else classes.index(positive),
        fingerprint=fingerprint([digests["pixels"], digest(labels)]),
        source=source or str(folder),
        path=str(folder),
    )


def decode(paths: Sequence[Path], size: int) -> np.ndarray:
    """uint8 [n, 3, size, size]; every file that cannot be read is named."""
    from tqdm import tqdm

    pixels, broken = np.empty((len(paths), 3, size, size), dtype=np.uint8), []

    def fill(k: int) -> None:
        try:
            pixels[k] = thumbnail(paths[k], size)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises each of them for damaged files
            broken.append(f"{paths[k]}: {error}")

    with ThreadPoolExecutor() as pool:
        list(
            tqdm(pool.map(fill, range(len(paths))), total=len(paths), desc="decoding images", leave=False, disable=None)
        )
    if broken:
        raise DataError(
            f"{len(broken)} of {len(paths):,} images cannot be read. Repair or delete them:{listed(sorted(broken))}"
        )
    return pixels


def thumbnail(path: Path, size: int) -> np.ndarray:
    """uint8 [3, size, size]: the shorter side scaled to `size`, then the central square."""
    from PIL import Image
    from torchvision.transforms import functional as transform

    with Image.open(path) as image:
        image = transform.center_crop(transform.resize(image.convert("RGB"), size), [size, size])
    return np.asarray(image).transpose(2, 0, 1)


DATASETS = {
    "images": Dataset(
        load=images,
        kind="image",
        about="your own images, a folder per class: dataset.path=FOLDER",
        licence="your own",
        citation="your own",
        where="your folder",
    )
}
