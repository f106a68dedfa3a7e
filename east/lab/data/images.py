"""Your own images: one folder per class, as JPEG, PNG, WebP, BMP or GIF (its first frame)."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from east.choices import ConfigError, choose
from east.lab import bars
from east.lab.data.common import DataError, Images, listed, shown
from east.lab.data.sources import Dataset, Root, decoded

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # nothing else is decoded, whatever the file's extension
MAX_PIXELS = 100_000_000  # per image, 300 MB decoded; a tiny file can claim far more
PARTS = {"train", "training", "val", "valid", "validation", "test"}  # of a split; no classes
DECODING = 3  # raised when `decode` gives other pixels, so that cached ones are not used


def images(root: Root = None, *, path: str | None = None, size: int = 64, positive: str | None = None) -> Images:
    """Images path/<class>/<any name>.jpg, png, webp, bmp or gif, scaled to `size` on the shorter side and cropped.

    Classes are the folder names in alphabetical order; of two, the positive one (default: the rarer) comes second.
    """
    folder = Path(path or "").expanduser()
    if path is None or not folder.is_dir():
        raise DataError(
            f"dataset=images: expected dataset.path=FOLDER with one folder of images per class, got {path}."
        )
    inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    files = {entry.name: image_files(entry) for entry in inside}
    if files and {name.lower() for name in files} <= PARTS:
        raise DataError(
            f"dataset=images: expected one folder per class in {folder}, but {', '.join(files)} look like parts of a "
            f"split. Name one of them, such as dataset.path={inside[-1]}; rename them if they are classes."
        )
    empty = [name for name in files if not files[name]]
    if empty or len(files) < 2:
        got = f"none in {', '.join(empty)}" if empty else f"found {len(files)} ({', '.join(files) or 'none'})"
        raise DataError(f"dataset=images: expected two or more folders in {folder}, with images in each; {got}.")
    classes = list(files)
    if positive is not None:
        positive = choose("class", str(positive), classes)  # a folder may be called 3
    if len(classes) == 2:
        positive = positive or min(classes, key=lambda name: len(files[name]))
        classes.sort(key=lambda name: name == positive)
    return from_files("images", folder, {name: files[name] for name in classes}, size, positive, own=True)


def image_files(folder: Path) -> list[Path]:
    """Files with an image extension below a folder, except hidden ones such as those macOS leaves.

    Hidden folders, such as .ipynb_checkpoints, hold copies, which a split would put on both sides.
    """
    return sorted(
        entry
        for entry in folder.rglob("*")
        if entry.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in entry.relative_to(folder).parts)
        and (entry.is_symlink() or not entry.is_dir())
    )


def from_files(
    name: str,
    folder: Path,
    files: dict[str, list[Path]],
    size: int,
    positive: str | None = None,
    source: str = "",
    own: bool = False,
) -> Images:
    """Load the images in `files`, by class; they are decoded once per size and content. own: see Data."""
    if not isinstance(size, int) or size < 8:
        raise ConfigError(f"{name}: size must be a whole number of at least 8 pixels, got {size!r}")
    classes = tuple(files)
    paths = [path for class_files in files.values() for path in class_files]
    state = hashlib.sha256(f"{size} {DECODING}".encode())
    for path in filter(Path.is_file, paths):  # a broken link is reported by `decode`
        with suppress(OSError), open(path, "rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    arrays, digests, _ = decoded(f"{name}-{size}-{state.hexdigest()[:16]}", lambda: {"pixels": decode(paths, size)})
    labels = np.repeat(np.arange(len(classes)), [len(class_files) for class_files in files.values()])
    return Images(
        pixels=torch.from_numpy(arrays["pixels"]),
        labels=torch.from_numpy(labels),
        classes=classes,
        name=name,
        positive=None if positive is None else classes.index(positive),
        inputs_digest=digests["pixels"],
        own=own,
        source=source or str(folder),
        path=str(folder),
    )


def decode(paths: Sequence[Path], size: int) -> np.ndarray:
    """Pixels uint8 [n, 3, size, size]; DataError lists unreadable files."""
    pixels, broken = np.empty((len(paths), 3, size, size), dtype=np.uint8), []

    def fill(k: int) -> None:
        try:
            pixels[k] = thumbnail(paths[k], size)
        except Exception as error:  # damaged files make Pillow raise nearly anything
            reason = (str(error) or type(error).__name__).replace(str(paths[k]), paths[k].name)
            broken.append(f"{paths[k]}: {shown(reason, 150, quoted=False)}")

    threads = min(8, (os.cpu_count() or 1) + 1)
    with bars.bar("decoding images", len(paths), "image") as bar, ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(fill, range(len(paths))):
            bar.update(1)
    if broken:
        count = f"{len(broken):,} of {len(paths):,}"
        raise DataError(f"{count} images cannot be read. Repair or delete them:{listed(sorted(broken))}")
    return pixels


def thumbnail(path: Path, size: int) -> np.ndarray:
    """uint8 [3, size, size]: the shorter side scaled to `size`, then the central square."""
    from PIL import Image, ImageOps
    from torchvision.transforms import functional as transform

    if not path.is_file():
        raise OSError("is not a regular file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
        opened = Image.open(path, formats=FORMATS)
    with opened as file:
        width, height = file.size
        if width * height > MAX_PIXELS:
            raise OSError(f"has {width:,} x {height:,} pixels, more than {MAX_PIXELS:,}; make it smaller")
        image: Image.Image = file
        shorter, longer = sorted(file.size)
        if size * size * longer > MAX_PIXELS * shorter:  # scaling all of a thin strip would fill the memory
            image = transform.center_crop(image, [shorter, shorter])
        with suppress(Exception):  # damaged EXIF data, of an image that may be sound
            image = ImageOps.exif_transpose(image)
        image = transform.center_crop(transform.resize(as_rgb(image), size), [size, size])
    return np.asarray(image).transpose(2, 0, 1)


def as_rgb(image: "Image.Image") -> "Image.Image":
    """Three channels of 8 bits. 16-bit grey values are divided by 257; Pillow would make all above 255 white.

    Transparent pixels show a white background, where black ones would hide a black drawing.
    """
    from PIL import Image

    if "A" in image.getbands() or (image.mode in ("1", "L", "P", "RGB") and "transparency" in image.info):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != "F" and not image.mode.startswith("I"):
        return image.convert("RGB")
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise OSError(f"has pixels from {pixels.min():g} to {pixels.max():g}; expected 8 or 16 bits: save it as 8 bits")
    return Image.fromarray(np.round(pixels / 257).astype(np.uint8)).convert("RGB")


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
