"""TinyImageNet from its official folders, decoded once and cached. Class ids are line numbers of wnids.txt, from 0.

The official test part has no labels, so the labelled validation part is the test part here, as is usual. A partial
copy can be loaded; `profcil data verify` reports what is missing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from profcil.data import files
from profcil.data.bundle import Bundle, Facts, File, Rows
from profcil.errors import DataError

FOLDER = "tiny-imagenet-200"
SIDE = 64  # pixels
DECODERS = 8  # threads
PARTIAL = True  # fewer examples than the official dataset are allowed
FACTS = Facts(
    name="tinyimagenet",
    title="TinyImageNet",
    modality="image",
    classes=200,
    train=100_000,
    test=10_000,
    files=(
        File(
            f"{FOLDER}.zip",
            size=248_100_043,
            md5="90528d7ca1a48142e341f4ef8d21d0de",
            url=f"http://cs231n.stanford.edu/{FOLDER}.zip",
            archive=True,
        ),
        File(f"{FOLDER}/wnids.txt"),
        File(f"{FOLDER}/words.txt"),
        File(f"{FOLDER}/val/val_annotations.txt"),
        File(f"{FOLDER}/val/images"),
        File(f"{FOLDER}/train"),
    ),
    views=("crop", "flip", "jitter"),
    encoder="resnet18",
    homepage="http://cs231n.stanford.edu",
    licence="ImageNet terms: non-commercial research and education",
    get=f"unpack {FOLDER}.zip from http://cs231n.stanford.edu there",
)
Listing = list[tuple[str, int]]  # image path relative to the dataset folder, class id


def load(root: Path, seed: int = 0) -> Bundle:
    """Training and validation images as uint8 arrays. The split is the official one, so `seed` is not used."""
    folder = files.locate(FACTS, root, f"{FOLDER}/wnids.txt").parent
    wnids = folder.joinpath("wnids.txt").read_text("utf-8").split()
    train = part(folder, "train", train_listing(folder, wnids))
    test = part(folder, "test", val_listing(folder, wnids))
    return Bundle(FACTS, train, test, None, class_names(folder, wnids))


def counts(root: Path) -> tuple[int, int]:
    """The numbers of training and test images, counted without decoding any."""
    folder = files.locate(FACTS, root, f"{FOLDER}/wnids.txt").parent
    wnids = folder.joinpath("wnids.txt").read_text("utf-8").split()
    return len(train_listing(folder, wnids)), len(val_listing(folder, wnids))


def train_listing(folder: Path, wnids: list[str]) -> Listing:
    """The training images, sorted by class id and file name."""
    listing: Listing = []
    for label, wnid in enumerate(wnids):
        images = f"train/{wnid}/images"
        for path in sorted(folder.glob(f"{images}/*.JPEG")):
            listing.append((f"{images}/{path.name}", label))
    return listing


def val_listing(folder: Path, wnids: list[str]) -> Listing:
    """The validation images, in the order of val_annotations.txt. Images missing from a partial copy are left out."""
    ids = {wnid: label for label, wnid in enumerate(wnids)}
    annotations = folder / "val" / "val_annotations.txt"
    present = {path.name for path in folder.glob("val/images/*.JPEG")}
    try:
        lines = annotations.read_text("utf-8").splitlines()
        pairs = [line.split("\t")[:2] for line in lines]
        return [(f"val/images/{name}", ids[wnid]) for name, wnid in pairs if name in present]
    except FileNotFoundError:
        raise files.damaged(FACTS, annotations, "is missing") from None
    except (KeyError, ValueError) as error:
        raise files.damaged(FACTS, annotations, f"names a class that wnids.txt does not have ({error})") from error


def part(folder: Path, name: str, listing: Listing) -> Rows:
    """The images of a listing, read from the cache if the same listing was decoded before."""
    if not listing:
        raise DataError(f"{FACTS.title}'s {name} part in {folder} has no images; {FACTS.get}")
    y = torch.tensor([label for _, label in listing])
    cache_name = f"{name}-{files.short_hash(listing)}"
    decoded = files.cached(folder, cache_name, lambda: {"x": decode(folder, listing)})
    return Rows(torch.from_numpy(decoded["x"]), y)


def decode(folder: Path, listing: Listing) -> np.ndarray:
    """Decode images to uint8 [n, 3, 64, 64]. Grey images become three equal channels."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{FACTS.title} needs Pillow to decode its images; `pip install 'profcil[images]'`") from None
    x = np.empty((len(listing), 3, SIDE, SIDE), dtype=np.uint8)

    def read(row: int) -> None:
        path = folder / listing[row][0]
        try:
            with Image.open(path) as image:
                x[row] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except (OSError, SyntaxError, ValueError) as error:
            raise files.damaged(FACTS, path, f"is not a {SIDE} x {SIDE} image ({error})") from error

    with ThreadPoolExecutor(DECODERS) as pool:  # Pillow decodes without holding Python's lock
        deque(pool.map(read, range(len(listing))), maxlen=0)
    return x


def class_names(folder: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first name of each class in words.txt, or its WordNet id."""
    words = folder / "words.txt"
    lines = words.read_text("utf-8").splitlines() if words.exists() else []
    known = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return tuple(known.get(wnid, wnid).split(",")[0] for wnid in wnids)
