"""Folders of images, one per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from profcil.config import OwnSettings
from profcil.data._pixels import DEEP, FLOATS, header
from profcil.data.own.raw import PARTS, Raw
from profcil.errors import DataError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
LARGEST_SIDE = 64  # pixels; larger images are reduced, since encoders here are for small ones
SMALLEST_SIDE = 8  # two poolings and a quarter must be left of a side
GREY = ("1", "L", FLOATS, *DEEP)  # modes of pillow


def class_images(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """The class folders of a folder, sorted by name, with the image files below each, sorted by path."""
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not is_hidden(child):
            yield child.name, image_files(child)


def image_files(folder: Path) -> list[Path]:
    """The image files below a folder, at any depth, sorted by path."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(Path(name))]
        found += [Path(parent, name) for name in files if is_image_name(name)]
    return sorted(found)


def is_image_name(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES and not is_hidden(Path(name))


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is none of the user's: hidden ones, and what macOS adds to archives."""
    return path.name.startswith(".") or path.name == "__MACOSX"


def loose_images(folder: Path) -> list[Path]:
    """The image files in a folder itself, sorted by name."""
    return sorted(file for file in folder.iterdir() if file.is_file() and is_image_name(file.name))


def part_folders(folder: Path) -> dict[Path, str]:
    """The folders train, val and test below a folder, with their parts; empty if there is no train."""
    found = {}
    for child in sorted(folder.iterdir()):
        if child.is_dir() and child.name.lower() in PARTS:
            found[child] = PARTS[child.name.lower()]
    return found if "train" in found.values() else {}


def has_images(folder: Path) -> bool:
    """Whether a folder, or its folder train, has class folders with images."""
    folders = [*part_folders(folder), folder]
    return any(files for root in folders for _, files in class_images(root))


def read_images(folder: Path, settings: OwnSettings) -> Raw:
    """The files of class folders, which may be below folders train, val and test."""
    files: list[Any] = []
    labels: list[str] = []
    parts: list[str] = []
    for root, part in (part_folders(folder) or {folder: ""}).items():
        for name, images in class_images(root):
            if not images:
                raise DataError(
                    f"class folder {root / name} has no image ({', '.join(IMAGE_SUFFIXES[:3])}, ...); put images there "
                    "or remove the folder"
                )
            files += images
            labels += [name] * len(images)
            parts += [part] * len(images)
    check_readable(files, labels)
    shape, notes = image_shape(files, settings, folder)
    drawn = parts if any(parts) else []
    return Raw("image", files, labels, drawn, shape=shape, notes=notes)


def check_readable(files: Sequence[Path], labels: Sequence[str]) -> None:
    """Names a class folder without a readable image, else the first file that cannot be read."""
    unreadable = [i for i, file in enumerate(files) if header(file) is None]
    if not unreadable:
        return
    readable = {label for i, label in enumerate(labels) if i not in set(unreadable)}
    for i in unreadable:
        if labels[i] not in readable:
            raise DataError(
                f"class folder {files[i].parent} has no readable image; replace its files or remove the folder"
            )
    raise DataError(f"{files[unreadable[0]]} cannot be read as an image; remove or replace it")


def image_shape(files: Sequence[Any], settings: OwnSettings, where: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Channels, height and width of the images, and a note if they are resized."""
    headers = [found for file in files if (found := header(file)) is not None]
    if not headers:
        raise DataError(f"{where} has no readable image; replace its images")
    sizes = Counter((height, width) for _, height, width in headers)
    shape = settings.shape or default_shape(headers, sizes)
    is_image = len(shape) == 3 and shape[0] in (1, 3)
    if not is_image or min(shape[1:]) < SMALLEST_SIDE:
        raise DataError(
            f"own.shape is {list(shape)}, allowed is 1 or 3 channels, a height and a width of at least "
            f"{SMALLEST_SIDE}; for example --set 'own.shape=[3, 32, 32]'"
        )
    _, height, width = shape
    if list(sizes) == [(height, width)]:
        return tuple(shape), ()
    largest = max(sizes)
    given = f"{len(sizes)} sizes" if len(sizes) > 1 else f"the size {largest[0]} x {largest[1]}"
    note = f"{where} has images of {given}; all are resized to {height} x {width} pixels (own.shape)"
    return tuple(shape), (note,)


def default_shape(headers: Sequence[tuple[str, int, int]], sizes: Counter[tuple[int, int]]) -> tuple[int, int, int]:
    """The most frequent size, within the limits of a side, and one channel if all images are grey."""
    (height, width), _ = min(sizes.items(), key=lambda item: (-item[1], item[0]))
    scale = min(1.0, LARGEST_SIDE / max(height, width))
    sides = [max(SMALLEST_SIDE, round(side * scale)) for side in (height, width)]
    all_grey = all(mode in GREY for mode, _, _ in headers)
    channels = 1 if all_grey else 3
    return channels, sides[0], sides[1]
