"""Folders of images: yours, and Caltech-256."""

import hashlib
import os
import shutil
import tarfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from east.lab.data import DataError, caltech256, common, load, sources, split
from east.lab.data.common import digest
from east.lab.data.images import as_rgb


@pytest.fixture
def photographs(tmp_path, monkeypatch):
    """Two classes of noise images, 12 wide and 8 tall ones, in every colour mode; and an empty cache."""
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    monkeypatch.delenv("EAST_DATA_DIR", raising=False)
    random = np.random.RandomState(0)
    for name, count, size in (("cat", 12, (40, 60)), ("dog", 8, (50, 40))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(count):
            image = Image.fromarray(random.randint(0, 256, (*size, 3), dtype=np.uint8))
            image.convert(("RGB", "L", "RGBA", "P")[k % 4]).save(tmp_path / "photos" / name / f"{k:02}.png")
    return tmp_path / "photos"


def loaded(photographs):
    return load("images", path=str(photographs), size=16)


def test_a_folder_of_images_is_a_dataset(photographs):
    images = loaded(photographs)
    assert (images.classes, images.positive) == (("cat", "dog"), 1)  # the rarer one is positive
    assert images.labels.tolist() == [0] * 12 + [1] * 8
    resize = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(16), transforms.PILToTensor()])
    expected = resize(Image.open(photographs / "dog" / "00.png"))
    assert torch.equal(images.pixels[12], expected)
    (photographs / "cat").rename(photographs / "3")  # which a command line gives as a number
    assert load("images", path=str(photographs), size=16, positive=3).classes == ("dog", "3")


def test_pixels_are_hashed_once_per_load(photographs, monkeypatch):
    """When they are read from the cache; the fingerprint is that of the data."""
    loaded(photographs)
    hashed = []
    for module in (common, sources):
        monkeypatch.setattr(module, "digest", lambda array: hashed.append(array.ndim) or digest(array))
    images = loaded(photographs)
    assert hashed.count(4) == 1
    assert replace(images, fingerprint="").fingerprint == images.fingerprint


def test_images_in_hidden_folders_are_left_out(photographs):
    """Copies of an image may be in .ipynb_checkpoints and .thumbnails."""
    before = loaded(photographs)
    (photographs / "cat" / ".thumbnails" / "large").mkdir(parents=True)
    shutil.copy(photographs / "cat" / "00.png", photographs / "cat" / ".thumbnails" / "large" / "copy.png")
    assert loaded(photographs).fingerprint == before.fingerprint


def test_a_changed_image_folder_is_decoded_again(photographs):
    """Also if an image keeps its size and time, as cp -p and rsync -t leave it."""
    red, blue = (photographs / "cat" / name for name in ("a.bmp", "b.bmp"))
    for path, colour in ((red, "red"), (blue, "blue")):
        Image.new("RGB", (16, 16), colour).save(path)
    prints = [loaded(photographs).fingerprint]
    times = red.stat().st_atime_ns, red.stat().st_mtime_ns
    red.write_bytes(blue.read_bytes())
    os.utime(red, ns=times)
    prints.append(loaded(photographs).fingerprint)
    assert loaded(photographs).pixels[12].flatten(1)[:, 0].tolist() == [0, 0, 255]
    (photographs / "cat" / "00.png").unlink()
    prints.append(loaded(photographs).fingerprint)
    (photographs / "dog").rename(photographs / "hound")
    assert len({*prints, loaded(photographs).fingerprint}) == 4


def test_broken_images_are_named_and_nothing_is_cached(photographs):
    whole = (photographs / "cat" / "00.png").read_bytes()
    (photographs / "cat" / "00.png").write_bytes(whole[: len(whole) // 2])
    (photographs / "dog" / "01.png").write_bytes(b"not an image")
    Image.open(photographs / "cat" / "01.png").save(photographs / "cat" / "tiff.png", format="TIFF")
    message = (
        r"(?s)^3 of 21 images cannot be read. Repair or delete.*cat/00.png.*cat/tiff.png: cannot ident.*dog/01.png"
    )
    with pytest.raises(DataError, match=message):
        loaded(photographs)
    assert list(photographs.parent.glob("cache/**/*.npy")) == []


def test_only_the_documented_formats_are_decoded(photographs):
    for format in ("jpeg", "webp", "bmp"):
        Image.open(photographs / "cat" / "00.png").convert("RGB").save(photographs / "cat" / f"new.{format}")
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(photographs / "dog" / "moving.gif", save_all=True, append_images=frames[1:])
    images = loaded(photographs)
    assert torch.bincount(images.labels).tolist() == [15, 9]
    assert images.pixels[-1, :, 8, 8].tolist() == [255, 0, 0]  # the first frame


def test_16_bit_images_keep_their_shades(photographs):
    shades = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    Image.fromarray(shades).save(photographs / "cat" / "00.png")
    images = loaded(photographs)
    assert images.pixels[0].flatten(1).tolist() == [list(range(256))] * 3
    for mode, value in (("F", 0.5), ("I", -1), ("I", 65536)):
        with pytest.raises(OSError, match=f"has pixels from {value:g} to {value:g}; expected 8 or 16 bits"):
            as_rgb(Image.new(mode, (2, 2), value))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_have_a_white_background(photographs, mode):
    """A black square on nothing stays visible, and half of black is grey."""
    drawing = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    drawing.paste((0, 0, 0, 255), (4, 4, 12, 12))
    drawing.convert(mode).save(photographs / "cat" / "00.png")
    pixels = loaded(photographs).pixels[0]
    assert (pixels[:, 4:12, 4:12] == 0).all()
    assert int((pixels == 0).sum()) == 3 * 64
    assert int((pixels == 255).sum()) == 3 * 192
    assert as_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 127))).getpixel((0, 0)) == (128, 128, 128)


def test_photographs_are_turned_upright(photographs):
    """EXIF orientation 6: the camera was held at a right angle, and the first row is the right side."""
    photograph = Image.new("RGB", (16, 16), "white")
    photograph.paste((0, 0, 0), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    photograph.save(photographs / "cat" / "00.png", exif=exif)
    photograph.save(photographs / "cat" / "01.png", exif=b"Exif\0\0damaged")
    turned, damaged = loaded(photographs).pixels[:2]
    assert (turned[:, :, :8] == 255).all()
    assert (turned[:, :, 8:] == 0).all()
    assert (damaged[:, :8] == 0).all()


def test_a_thin_strip_does_not_fill_the_memory(photographs, monkeypatch):
    """64 pixels wide it would have 245 million pixels; only the square in its middle is scaled."""
    strip = np.zeros((60_000, 1, 3), np.uint8)
    strip[29_990:30_010] = 200
    Image.fromarray(strip).save(photographs / "cat" / "00.png")
    scaled, resize = [], transforms.functional.resize
    monkeypatch.setattr(transforms.functional, "resize", lambda x, n: scaled.append(x.size) or resize(x, n))
    assert (load("images", path=str(photographs), size=64).pixels[0] == 200).all()
    assert max(max(size) for size in scaled) == 60  # of the other images


def test_decompression_bombs_are_refused(photographs):
    """A PNG whose header claims 60,000 x 60,000 pixels, and one that only exceeds our own limit."""
    for name, side in (("bomb", 60_000), ("large", 12_000)):
        small = bytearray((photographs / "cat" / "00.png").read_bytes())
        small[16:24] = side.to_bytes(4, "big") * 2
        small[29:33] = zlib.crc32(small[12:29]).to_bytes(4, "big")
        (photographs / "cat" / f"{name}.png").write_bytes(small)
    with pytest.raises(DataError, match=r"(?s)^2 of 22.*bomb.png: .*decompression bomb.*12,000 x 12,000 pixels"):
        loaded(photographs)


def test_only_regular_files_are_opened(photographs):
    for name, target in {"a": "/dev/zero", "b": photographs / "nowhere.png", "c": photographs / "dog"}.items():
        (photographs / "cat" / f"{name}.png").symlink_to(target)
    os.mkfifo(photographs / "cat" / "d.png")
    (photographs / "cat" / "e.png").mkdir()
    (photographs / "cat" / "._00.png").write_bytes(b"left by macOS")
    with pytest.raises(DataError, match=r"(?s)^4 of 24 images cannot be read.*(?:: is not a regular file\s.*){3}"):
        loaded(photographs)
    for k in range(10):
        (photographs / "dog" / f"bad{k}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"and 9 more$"):
        loaded(photographs)


def caltech_archive(folder, monkeypatch, evil: str | None = None):
    """An archive in Caltech-256's layout in the cache, with dogs, frogs and a file that is not an image."""
    archive = folder.parent / "cache" / caltech256.TAR.path
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w") as box:
        for number, name in (("056.dog", "dog"), ("080.frog-101", "cat")):
            for k, path in enumerate(sorted((folder / name).iterdir())):
                Image.open(path).convert("RGB").save(folder.parent / "photo.jpg")
                box.add(folder.parent / "photo.jpg", f"256_ObjectCategories/{number}/{number[:3]}_{k:04}.jpg")
        box.add(folder.parent / "photo.jpg", "256_ObjectCategories/056.dog/RENAME2")
        if evil:
            box.add(folder.parent / "photo.jpg", evil)
    checksum = f"md5:{hashlib.md5(archive.read_bytes()).hexdigest()}"
    monkeypatch.setattr(caltech256, "TAR", replace(caltech256.TAR, checksum=checksum))


def test_the_caltech256_archive_is_read(photographs, monkeypatch):
    caltech_archive(photographs, monkeypatch)
    images = load("caltech256", size=16)
    assert images.classes == ("dog", "frog")
    assert torch.bincount(images.labels).tolist() == [8, 12]
    assert "20 of 30,607 images, 2 of 257 classes" in images.source
    again = load("caltech256", root=photographs.parent / "cache" / "caltech256", size=16)
    assert again.fingerprint == images.fingerprint
    (photographs.parent / "cache" / "caltech256" / "class_counts.csv").write_text("category,images\n056.dog,7\n")
    with pytest.raises(DataError, match=r"has more images than .*\n  056.dog"):
        load("caltech256", size=16)


def test_photographs_of_caltech256_are_looked_for_as_documented_for_data_dir(photographs, monkeypatch):
    """In the cache, the user's folder and the archive; a folder without them does not end the search."""
    caltech_archive(photographs, monkeypatch)
    mine, elsewhere = photographs.parent / "mine", photographs.parent / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(photographs / "cat", mine / "001.ak47")
    cached = photographs.parent / "cache" / caltech256.FOLDER
    for root, expected in ((mine, mine), (elsewhere, cached), (mine, cached)):
        assert caltech256.photographs(root) == expected


def test_an_archive_that_points_outside_its_folder_is_refused(photographs, monkeypatch):
    caltech_archive(photographs, monkeypatch, evil="../../outside.jpg")
    with pytest.raises(DataError, match="cannot be unpacked"):
        load("caltech256", size=16)
    assert not list(photographs.parent.rglob("outside.jpg"))
    assert not list(photographs.parent.rglob("256_ObjectCategories"))


def test_a_folder_needs_one_folder_per_class(photographs, tmp_path):
    with pytest.raises(DataError, match=r"expected dataset.path=FOLDER .* got .*nowhere"):
        load("images", path=str(tmp_path / "nowhere"))
    (tmp_path / "some" / "only").mkdir(parents=True)
    with pytest.raises(DataError, match="with images in each; none in only"):
        load("images", path=str(tmp_path / "some"))
    parts = photographs.parent / "parts"
    for part in ("train", "test"):
        shutil.copytree(photographs, parts / part)
    with pytest.raises(DataError, match=r"but test, train look like parts of a split.*path=\S*/train"):
        load("images", path=str(parts), size=16)
    assert load("images", path=str(parts / "train"), size=16).classes == ("cat", "dog")


def test_images_are_normalised_by_the_training_part(photographs):
    splits = split(loaded(photographs))
    seen = splits.prepare(splits.train.inputs)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
