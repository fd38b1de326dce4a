"""Decodes image files: upright as their EXIF data says, on white where they are transparent, in 8 bits a channel."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.errors import DataError

ORIENTATION = 0x0112  # the EXIF tag
ON_ITS_SIDE = (5, 6, 7, 8)  # orientations that exchange height and width
LATE = "PNG"  # the format whose EXIF data may follow the pixels, and is rare; it is read with them
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # modes of pillow for 16 bits a pixel
FLOATS = "F"
MODES = {1: "L", 3: "RGB"}  # of pillow, by number of channels


def pillow() -> Any:
    """The module of pillow, which is an extra."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need the package pillow; install it with pip install 'profcil[images]'") from None
    return Image


@contextmanager
def opened(source: Path | bytes) -> Iterator[Any]:
    """An image file, or its content, whose pixels are not decoded yet. What pillow raises becomes an OSError."""
    Image = pillow()
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            yield image
    except (ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise OSError(str(error)) from None


def header(source: Path | bytes) -> tuple[str, int, int] | None:
    """Mode, height and width of an image as it is shown; None if it cannot be read. The pixels are not decoded."""
    try:
        with opened(source) as image:
            sides = (image.height, image.width)
            is_turned = image.format != LATE and orientation(image) in ON_ITS_SIDE
            height, width = sides[::-1] if is_turned else sides
            return image.mode, height, width
    except OSError:
        return None


def orientation(image: Any) -> int:
    return int(image.getexif().get(ORIENTATION, 1))


def read_image(source: Path | bytes, shape: Sequence[int]) -> Tensor:
    """An image file, or its content, as uint8 [channels, height, width], resized if it has another size."""
    channels, height, width = shape
    if channels not in MODES:
        raise DataError(
            f"images with {channels} channels cannot be read from files; use profcil.load_model with arrays"
        )
    try:
        with opened(source) as image:
            resized = opaque(upright(eight_bits(image))).convert(MODES[channels]).resize((width, height))
    except OSError as error:
        name = "an image" if isinstance(source, bytes) else source
        raise DataError(f"{name} cannot be read as an image ({error}); remove or replace it") from None
    pixels = np.asarray(resized, dtype=np.uint8).reshape(height, width, channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def eight_bits(image: Any) -> Any:
    """An image of 16 bits a pixel with its upper 8 bits. Floats have no known range."""
    if image.mode == FLOATS:
        raise OSError("its pixels are floating-point numbers, whose range is not known; save it with 8 or 16 bits")
    if image.mode not in DEEP:
        return image
    reduced = pillow().fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    reduced.getexif().update(image.getexif())
    return reduced


def upright(image: Any) -> Any:
    """An image turned as its EXIF data says."""
    if orientation(image) == 1:
        return image
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def opaque(image: Any) -> Any:
    """An image on white where it is transparent."""
    if not ("A" in image.getbands() or "transparency" in image.info):
        return image
    above = image.convert("RGBA")
    white = pillow().new("RGBA", above.size, "white")
    return pillow().alpha_composite(white, above)
