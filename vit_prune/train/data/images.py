"""Image files and PIL images of every kind, made RGB with 8 bits per channel."""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

ORIENTATION = 0x0112  # the EXIF tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DECODING_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, struct.error, zlib.error, Image.DecompressionBombError)


class UnreadableImage(OSError):
    """An image file that cannot be decoded; the message names it. A loader's worker process wraps it in a traceback, taken off here."""

    def __str__(self) -> str:
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].strip()


def read_image(file: str | Path | BinaryIO, name: str | None = None) -> Image.Image:
    """The first frame of a file, as `to_rgb` makes it.

    Raises: UnreadableImage with `name`, or the path, of a file that is missing, damaged or no image.
    """
    try:
        with Image.open(file) as image:
            return to_rgb(image)
    except DECODING_ERRORS as error:
        raise UnreadableImage(f"cannot read the image {name or file}: {error}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """A new RGB image, upright: turned and mirrored as the EXIF orientation says, which timm and torchvision leave as stored.

    Alpha and transparent colours are dropped, as timm and torchvision do: what a pixel holds under its transparency shows. Palettes are looked up,
    gray is repeated three times, CMYK becomes RGB. 16-bit gray (modes I;16 and I) is scaled from 0..65535 to 0..255, whatever values the image
    holds, so that a dark one stays dark. Of an animation, the frame that the image stands at.

    Raises: ValueError for integers outside 0..65535, for floats, which have no fixed white, and for modes that Pillow cannot convert; OSError and
    others of DECODING_ERRORS for damaged data.
    """
    image.load()
    image = upright(image)
    if image.mode.startswith("I"):
        return scale_16_bit(image)
    if image.mode == "F":
        raise ValueError("its pixels are floats, which have no fixed white; save it with 8 or 16 bits per channel")
    if image.mode == "PA" or (image.mode == "P" and "transparency" in image.info):
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    return image.convert("RGB")


def upright(image: Image.Image) -> Image.Image:
    """The image as its EXIF orientation says; as it is where there is none, or where the EXIF data is damaged."""
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # Pillow's parser raises all kinds of errors on damaged EXIF data, and the pixels are fine
        turn = None
    return image if turn is None else image.transpose(turn)


def scale_16_bit(image: Image.Image) -> Image.Image:
    """Integer gray on the scale 0..65535 as RGB. Raises: ValueError for values outside it."""
    pixels = np.asarray(image).astype(np.int64)
    low, high = pixels.min(), pixels.max()
    if low < 0 or high > 65535:
        raise ValueError(f"its pixels go from {low} to {high}, expected integers from 0 to 65535; save it with 8 or 16 bits per channel")
    return Image.fromarray(((pixels + 128) // 257).astype(np.uint8)).convert("RGB")  # 257 = 65535 / 255, rounded to nearest


def read_bytes(row: dict | None, name: str) -> Image.Image:
    """An undecoded image of the package datasets: {"bytes": of the file or None, "path": or None}, or None. Raises: UnreadableImage."""
    content, path = (row or {}).get("bytes"), (row or {}).get("path")
    if content is None and path is None:
        raise UnreadableImage(f"cannot read the image {name}: there is none")
    return read_image(path) if content is None else read_image(BytesIO(content), path or name)
