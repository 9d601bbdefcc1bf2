"""Images of every kind become RGB, upright, on the scale 0..255."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vit_prune.train.data import UnreadableImage, read_image, to_rgb

RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20  # 0 to 220


def saved(image: Image.Image, file_format: str, **options) -> Image.Image:
    """The image as it comes back from a file."""
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return Image.open(file)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def gray(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    pixels = np.asarray(image)
    np.testing.assert_array_equal(pixels[..., 0], pixels[..., 2])
    return pixels[..., 0]


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_instead_of_clipped_to_white(file_format, dtype):
    wide = (RAMP.astype(np.uint16) * 257).astype(dtype)
    if file_format == "PNG" and dtype == ">u2":
        pytest.skip("PNG has one byte order")
    image = saved(Image.fromarray(wide), file_format)
    assert image.mode in ("I;16", "I;16B")
    np.testing.assert_array_equal(gray(to_rgb(image)), RAMP)


def test_a_dark_16_bit_image_stays_dark_instead_of_passing_for_8_bit():
    assert gray(to_rgb(saved(Image.fromarray(RAMP.astype(np.uint16)), "PNG"))).max() == 1  # 220 of 65535


def test_mode_i_is_on_the_scale_of_16_bit_too():
    np.testing.assert_array_equal(gray(to_rgb(saved(Image.fromarray(RAMP.astype(np.int32) * 257), "TIFF"))), RAMP)
    assert gray(to_rgb(Image.new("I", (2, 2), 65535))).min() == 255


@pytest.mark.parametrize(("value", "message"), [(-1, "from -1 to -1"), (65536, "from 65536 to 65536")])
def test_integers_beyond_16_bit_are_refused_instead_of_wrapped(value, message):
    with pytest.raises(ValueError, match=message):
        to_rgb(Image.new("I", (2, 2), value))


def test_a_float_tiff_is_refused_instead_of_clipped_to_black(tmp_path):
    Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)).save(tmp_path / "x.tiff")
    with pytest.raises(UnreadableImage, match=r"x\.tiff: its pixels are floats, which have no fixed white; save it"):
        read_image(tmp_path / "x.tiff")


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P", "RGBA", "CMYK", "YCbCr"])
def test_every_mode_keeps_its_colours(mode):
    original = Image.fromarray((RAMP > 100).astype(np.uint8) * 255)
    np.testing.assert_array_equal(gray(to_rgb(original.convert(mode))), np.asarray(original))


def test_a_cmyk_jpeg_is_not_inverted():
    red = saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert red.mode == "CMYK"
    assert np.abs(np.asarray(to_rgb(red)).astype(int) - (255, 0, 0)).max() <= 6


def test_a_palette_is_looked_up_and_its_transparency_dropped_without_a_warning(recwarn):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 40, 50])
    image.putdata([0, 1])
    for transparency in (None, 1, bytes((0, 128))):
        options = {} if transparency is None else {"transparency": transparency}
        loaded = saved(image, "PNG", **options)
        assert loaded.mode == "P"
        assert np.asarray(to_rgb(loaded)).tolist() == [[[200, 10, 20], [30, 40, 50]]]
    assert not recwarn.list


def test_alpha_is_dropped_instead_of_blended_with_black():
    assert to_rgb(saved(Image.new("RGBA", (1, 1), (200, 10, 20, 0)), "PNG")).getpixel((0, 0)) == (200, 10, 20)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_an_image_is_turned_upright_once_in_every_format(orientation, file_format):
    """Compared in coarse blocks, for lossy formats."""
    upright = np.kron(np.array([[0, 80, 160], [255, 40, 120]], dtype=np.uint8), np.ones((16, 16), dtype=np.uint8))
    undo = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}  # the others are their own inverse
    own = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    turn = (undo | own | {5: Image.Transpose.TRANSPOSE, 7: Image.Transpose.TRANSVERSE}).get(orientation)
    stored = Image.fromarray(upright) if turn is None else Image.fromarray(upright).transpose(turn)
    result = np.asarray(to_rgb(saved(stored.convert("RGB"), file_format, exif=oriented(orientation))))[8::16, 8::16, 0]
    assert np.abs(result.astype(int) - upright[8::16, 8::16]).max() < 12


def test_16_bit_gray_is_turned_too():
    image = saved(Image.fromarray(RAMP.astype(np.uint16) * 257), "PNG", exif=oriented(6))
    np.testing.assert_array_equal(gray(to_rgb(image)), np.rot90(RAMP, -1))


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12", b"Exif\0\0nonsense"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_exif_data_costs_no_image(exif):
    assert to_rgb(saved(Image.fromarray(RAMP), "JPEG", exif=exif)).size == (4, 3)


def test_an_orientation_outside_1_to_8_changes_nothing():
    assert to_rgb(saved(Image.fromarray(RAMP), "JPEG", exif=oriented(9))).size == (4, 3)


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(file_format):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    image = saved(frames[0], file_format, save_all=True, append_images=frames[1:])
    assert image.n_frames == 2
    assert to_rgb(image).getpixel((8, 8))[0] > 240


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (3, 2)])
@pytest.mark.parametrize("is_training", [True, False])
def test_tiny_and_narrow_images_survive_the_transforms(size, is_training):
    transform = create_transform(224, is_training=is_training, auto_augment="rand-m9-mstd0.5-inc1" if is_training else None)
    for mode in ("RGB", "1", "I;16", "P"):
        assert transform(to_rgb(Image.new(mode, size))).shape == torch.Size((3, 224, 224))


@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "webp", "tiff", "bmp"])
def test_a_truncated_file_of_any_format_is_named(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    noise = np.random.default_rng(0).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    for share in (0, 0.02, 0.5, 0.9):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)] if share else b"")
        with pytest.raises(UnreadableImage, match=rf"cannot read the image .*x\.{ending}: "):
            read_image(path)
        Image.fromarray(noise).save(path)
