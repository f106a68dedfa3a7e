"""Caltech-256: 30,607 photographs in 257 classes (one is clutter), 80 to 827 per class."""

import tarfile
from pathlib import Path

from east.choices import choose
from east.lab.data.common import DataError, Images, listed
from east.lab.data.images import from_files
from east.lab.data.sources import Dataset, File, Root, copies, fetch, settle, store, workspace

TAR = File(
    "caltech256/256_ObjectCategories.tar",
    "md5:67b4f42ca05d46448c6bb8ecd2220f6d",
    url="https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
)
FOLDER = "caltech256/256_ObjectCategories"
NUMBERED = "[0-9][0-9][0-9].*"


def caltech256(root: Root = None, *, size: int = 64, classes: list[str] | None = None) -> Images:
    """Images scaled to `size` on the shorter side and cropped centrally; classes in the order of their numbers.

    Torchvision's layout: 256_ObjectCategories/056.dog/056_0001.jpg. Any subset of the 257 folders works; labels number
    the folders present, so with all of them dog is 55 and frog 79. classes: names of the classes to load.
    """
    folder = photographs(root)
    by_folder = {entry.name: sorted(entry.glob("*.jpg")) for entry in sorted(folder.glob(NUMBERED))}
    coverage = check(folder, {name: len(paths) for name, paths in by_folder.items() if paths})
    files = {name[4:].removesuffix("-101"): paths for name, paths in by_folder.items()}  # -101: also in Caltech-101
    for name in classes or ():
        choose("class of caltech256", name, files)
    files = {name: paths for name, paths in files.items() if paths and (classes is None or name in classes)}
    if len(files) < 2:
        raise DataError(f"caltech256: expected at least two class folders in {folder}, found {len(files)}.")
    return from_files("caltech256", folder, files, size, source=f"{TAR.url} ({coverage})")


def photographs(root: Root) -> Path:
    """The folder of the class folders, all or some: the cached one, the user's, or from the archive."""
    for folder in (*copies(FOLDER, root), *([Path(root).expanduser()] if root else [])):
        if any(folder.glob(NUMBERED)):
            return folder
    archive = fetch(TAR, root=root)
    try:
        with workspace() as private, tarfile.open(archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 have none
            tar.extractall(private)
            settle(private / "256_ObjectCategories", store() / FOLDER)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"caltech256: {archive} cannot be unpacked into {store()}: {error}") from error
    return store() / FOLDER


def check(folder: Path, counts: dict[str, int]) -> str:
    """How much of the full set is present. counts: images by class, compared with class_counts.csv if that exists."""
    images = sum(counts.values())
    if len(counts) == 257 and images != 30_607:
        raise DataError(f"caltech256: expected 30,607 images in 257 classes, found {images:,} in {folder}.")
    file = folder.parent / "class_counts.csv"
    lines = file.read_text(encoding="utf-8").split()[1:] if file.exists() else []
    full = dict(line.split(",") for line in lines)
    wrong = [
        f"{name} has {n} images, expected {full.get(name, 0)}"
        for name, n in counts.items()
        if n > int(full.get(name, 0))
    ]
    if full and wrong:
        raise DataError(f"caltech256: {folder} has more images than {file} lists:{listed(wrong)}")
    return f"{images:,} of 30,607 images, {len(counts)} of 257 classes"


DATASETS = {
    "caltech256": Dataset(
        load=caltech256,
        kind="image",
        about="30,607 images, 257 classes; any part of the class folders",
        licence="CC BY 4.0",
        citation="G. Griffin, A. Holub, P. Perona: Caltech-256 Object Category Dataset. Caltech, 2007. "
        "doi:10.22002/D1.20087",
        stored=(FOLDER, TAR.path),
    )
}
