"""Caltech-256: 30,607 photographs in 257 classes (one is clutter), 80 to 827 per class."""

import tarfile
from pathlib import Path

import pandas as pd

from east.choices import choose
from east.lab.data.common import DataError, Images, listed
from east.lab.data.images import from_files
from east.lab.data.sources import Dataset, File, Root, copies, fetch, store, workspace
from east.lab.files import replace_folder

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
    found = {entry.name: sorted(entry.glob("*.jpg")) for entry in sorted(folder.glob(NUMBERED))}
    files = {name[4:].removesuffix("-101"): paths for name, paths in found.items()}  # -101: also in Caltech-101
    for name in classes or ():
        choose("class of caltech256", name, files)
    present, count = sum(map(bool, files.values())), sum(map(len, files.values()))
    if present < 2 or (present == 257 and count != 30_607):
        expected = "expected 30,607 images in 257 classes, or some of these classes"
        raise DataError(f"caltech256: {expected}; found {count:,} images in {present} classes in {folder}.")
    listing = folder.parent / "class_counts.csv"  # of the full set
    if listing.exists():
        full = pd.read_csv(listing, index_col=0)["images"]
        if wrong := [name for name, paths in found.items() if len(paths) > full.get(name, 0)]:
            raise DataError(f"caltech256: {folder} has more images than {listing} lists, in classes:{listed(wrong)}")
    files = {name: paths for name, paths in files.items() if paths and (classes is None or name in classes)}
    source = f"{TAR.url} ({count:,} of 30,607 images, {present} of 257 classes)"
    return from_files("caltech256", folder, files, size, source=source)


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
            target = store() / FOLDER
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():  # another process may have been faster
                replace_folder(private / "256_ObjectCategories", target)
            return target
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"caltech256: {archive} cannot be unpacked into {store()}: {error}") from error


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
