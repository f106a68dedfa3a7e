"""Caltech-256: 30,607 photographs in 257 classes (one is clutter), 80 to 827 of each."""

import tarfile
from pathlib import Path

from east.choices import choose
from east.data.common import DataError, Images, listed
from east.data.images import from_files
from east.data.sources import Dataset, File, fetch, find, settle, store, workspace

TAR = File(
    "caltech256/256_ObjectCategories.tar",
    "md5:67b4f42ca05d46448c6bb8ecd2220f6d",
    url="https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
)
FOLDER = "caltech256/256_ObjectCategories"


def caltech256(root=None, *, size: int = 64, classes: list[str] | None = None) -> Images:
    """Images scaled to `size` on the shorter side and cropped centrally; classes in the order of their numbers.

    Torchvision's layout: 256_ObjectCategories/056.dog/056_0001.jpg. Any subset of the 257 folders works; labels number
    the folders present, so with all of them dog is 55 and frog 79. `classes` selects some by name.
    """
    folder = photographs(root)
    files = {}
    for place in sorted(folder.glob("[0-9][0-9][0-9].*")):
        files[place.name[4:].removesuffix("-101")] = sorted(place.glob("*.jpg"))  # -101: also in Caltech-101
    part = check(folder, {paths[0].parent.name: len(paths) for paths in files.values() if paths})
    for name in classes or ():
        choose("class of caltech256", name, files)
    files = {name: paths for name, paths in files.items() if paths and (classes is None or name in classes)}
    if len(files) < 2:
        raise DataError(f"caltech256: expected at least two class folders in {folder}, found {len(files)}.")
    return from_files("caltech256", folder, files, size, source=f"{TAR.url} ({part})")


def photographs(root) -> Path:
    """The folder that holds the class folders. One given by the user comes first and may be incomplete."""
    if root is not None:
        root = Path(root).expanduser()
        for place in (root / FOLDER, root / "256_ObjectCategories", root):
            if any(place.glob("[0-9][0-9][0-9].*")):
                return place
        raise DataError(f"caltech256: no class folders such as 056.dog in {root}.")
    for place in find(FOLDER):
        return place
    archive = fetch(TAR)
    try:
        with workspace() as private, tarfile.open(archive) as box:
            unpack(box, private)
            settle(private / "256_ObjectCategories", store() / FOLDER)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"caltech256: {archive} cannot be unpacked into {store()}: {error}") from error
    return store() / FOLDER


def unpack(box: tarfile.TarFile, folder: Path) -> None:
    """Extract files and folders, but no links and nothing outside: Python 3.11.0 to 3.11.3 lack tarfile's filter."""
    box.extraction_filter = getattr(tarfile, "data_filter", None)
    members = [member for member in box if member.isfile() or member.isdir()]
    for member in members:
        if not (folder / member.name).resolve().is_relative_to(folder.resolve()):
            raise tarfile.TarError(f"{member.name} would lie outside the destination")
    box.extractall(folder, members)


def check(folder: Path, found: dict[str, int]) -> str:
    """How much of the full set is present, checked against class_counts.csv if that lies beside the folder."""
    images = sum(found.values())
    if len(found) == 257 and images != 30_607:
        raise DataError(f"caltech256: expected 30,607 images in 257 classes, found {images:,} in {folder}.")
    counts = folder.parent / "class_counts.csv"
    if counts.exists():
        known = {
            name: int(count)
            for name, count in (line.split(",") for line in counts.read_text(encoding="utf-8").split()[1:])
        }
        wrong = [
            f"{name} has {n} images, expected {known.get(name, 0)}"
            for name, n in found.items()
            if n > known.get(name, 0)
        ]
        if wrong:
            raise DataError(f"caltech256: {folder} holds more than {counts} knows of:{listed(wrong)}")
    return f"{images:,} of 30,607 images, {len(found)} of 257 classes"


DATASETS = {
    "caltech256": Dataset(
        load=caltech256,
        kind="image",
        about="30,607 images, 257 classes; any part of the class folders",
        licence="CC BY 4.0",
        citation="G. Griffin, A. Holub, P. Perona: Caltech-256 Object Category Dataset. Caltech, 2007. "
        "doi:10.22002/D1.20087",
        needs=((TAR,),),
        prepared=FOLDER,
    )
}
