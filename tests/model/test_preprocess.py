"""Images are prepared as torchvision and timm prepare them, and what has no translation is named."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from mettle.data.image_decoding import decode_image
from mettle.data.inputs import ImageArray, ImageFiles
from mettle.errors import InputError
from mettle.model import Preprocess
from mettle.model.backbones import import_timm, import_torchvision

import_torchvision()
from torchvision import transforms as v1  # noqa: E402 - the import above makes it possible beside a CPU build of torch
from torchvision.models import ResNet18_Weights  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

SHAPES = [(37, 53), (53, 37), (64, 64), (33, 200), (129, 40), (24, 24), (7, 5), (301, 300)]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def images():
    """Noise, which shows every shift of a pixel, and smooth images."""
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        yield Image.fromarray(rng.integers(0, 256, (*shape, 3), np.uint8))
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))
        yield small.resize(shape[::-1], Image.Resampling.BICUBIC)


def grey_levels(transform, image, preprocess):
    """What a transform gives, as (h, w, c) grey levels before its normalization."""
    x = transform(image)
    if preprocess.mean is not None:
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
        x = x * std + mean
    return (255 * x).permute(1, 2, 0).numpy()


def largest_difference(transform, preprocess):
    found = []
    for image in images():
        wanted = grey_levels(transform, image, preprocess)
        found.append(np.abs(wanted - preprocess.decode(image)).max())
    return max(found)


@pytest.mark.parametrize(
    ("steps", "most"),
    [
        ([v1.Resize(32), v1.CenterCrop(28), v1.ToTensor(), v1.Normalize(MEAN, STD)], 0.01),
        ([v1.Resize(28), v1.CenterCrop(28), v1.ToTensor()], 0.01),
        ([v1.Resize((20, 31)), v1.ToTensor()], 0.01),
        ([v2.Resize((40, 60), v2.InterpolationMode.BICUBIC), v2.CenterCrop((20, 30)), *FLOATS], 0.01),
        ([v2.Resize(29, v2.InterpolationMode.LANCZOS), v2.CenterCrop(23), *FLOATS, v2.Normalize(MEAN, STD)], 0.01),
        ([v2.Resize(29, v2.InterpolationMode.NEAREST), v2.CenterCrop(23), *FLOATS], 0.01),
        # Tensors are resized by torch itself, in other arithmetic than Pillow's.
        ([v2.ToImage(), v2.Resize(32), v2.CenterCrop(28), v2.ToDtype(torch.float32, scale=True)], 1.01),
        ([v2.PILToTensor(), v2.ConvertImageDtype(torch.float32), v2.Resize(32), v2.CenterCrop(28)], 1.51),
    ],
)
def test_a_compose_of_torchvision_translates(steps, most):
    library = v1 if type(steps[0]).__module__.startswith("torchvision.transforms.transforms") else v2
    transform = library.Compose(steps)
    assert largest_difference(transform, Preprocess.translate(transform)) <= most


def test_grey_is_the_grey_of_torchvision():
    transform = v2.Compose([v2.Grayscale(), v2.Resize(24), v2.CenterCrop(20), *FLOATS, v2.Normalize([0.5], [0.2])])
    found = Preprocess.translate(transform)
    assert found.shape == (1, 20, 20) and found.mean == (0.5,)
    assert largest_difference(transform, found) <= 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"crop_pct": 0.95, "interpolation": "bilinear"},
        {"crop_pct": 1.0},
        {"input_size": (3, 24, 40), "crop_pct": 0.9},
        {"crop_mode": "squash", "crop_pct": 0.8},
        {"crop_mode": "border", "mean": (0.5, 0.5, 0.5), "crop_pct": 0.9},
        {"crop_mode": "border", "mean": (0.5, 0.5, 0.5), "crop_pct": 1.0},
    ],
)
def test_a_configuration_of_timm_translates(changes):
    data = pytest.importorskip("timm.data") if import_timm() else None
    assert data is not None
    config = {"input_size": (3, 28, 28), "interpolation": "bicubic", "mean": MEAN, "std": STD, "crop_pct": 0.875}
    config |= {"crop_mode": "center"} | changes
    transform = data.create_transform(**config)
    found = Preprocess.translate({"url": "https://weights.invalid", "num_classes": 1000} | config)
    assert found.shape == config["input_size"] and found.mean == config["mean"]
    assert largest_difference(transform, found) <= 0.01
    if config["crop_mode"] == "center" and config["input_size"][1] == config["input_size"][2]:
        assert largest_difference(transform, Preprocess.translate(transform)) <= 0.01


def test_the_transforms_of_pretrained_weights_translate():
    found = Preprocess.translate(ResNet18_Weights.IMAGENET1K_V1.transforms())
    assert found == Preprocess(224, crop=0.875, mean=MEAN, std=STD)


def test_every_size_before_the_crop_is_found_again():
    for size in (23, 224, 299):
        for before in range(size, 2 * size):
            steps = v1.Compose([v1.Resize(before), v1.CenterCrop(size), v1.ToTensor()])
            assert int(size / Preprocess.translate(steps).crop) == before  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (v2.Compose([v2.Resize(32), v2.CenterCrop(28), v2.RandomHorizontalFlip(), *FLOATS]), "RandomHorizontalFlip"),
        (v2.Compose([v2.Resize(32), v2.CenterCrop(28), v2.ToImage()]), "does not scale"),
        (v2.Compose([v2.Resize(32), *FLOATS]), "add CenterCrop"),
        (v2.Compose([v2.CenterCrop(32), *FLOATS]), "CenterCrop.*no translation"),
        (v2.Compose([v2.Resize(32), v2.CenterCrop((28, 20)), *FLOATS]), "same share"),
        (v2.Compose([v2.Resize(20), v2.CenterCrop(28), *FLOATS]), "at most all"),
        (v2.Compose(FLOATS), "no Resize"),
        (v2.Compose([v2.Resize(32, max_size=40), v2.CenterCrop(28), *FLOATS]), "Resize.*no translation"),
        (v2.Compose([v2.ToImage(), v2.Resize(32, antialias=False), v2.CenterCrop(28)]), "antialias=False.*no transl"),
        (v2.Compose([v2.Resize(32), v2.CenterCrop(28), v2.ToImage(), v2.ToDtype(torch.float32)]), "ToDtype.*no tran"),
        (v2.Compose([v2.Resize(9), v2.CenterCrop(8), v2.ToImage(), v2.Normalize(MEAN, STD)]), "Normalize.*no transl"),
        (v1.Compose([v1.Resize(9), v1.CenterCrop(8), v1.ToTensor(), lambda x: 2 * x]), "lambda.*no translation"),
        ({"input_size": (3, 28, 28), "crop_mode": "border"}, "crop_mode 'border'.*grey"),
        ({"input_size": (3, 28, 28), "crop_mode": "corner"}, "crop_mode 'corner'"),
        ({"input_size": 224}, "channels, height, width"),
        (lambda image: image, "must be a mettle.model.Preprocess"),
        (224, "must be a mettle.model.Preprocess"),
    ],
)
def test_what_has_no_translation_is_named_in_one_line(given, message):
    with pytest.raises(InputError, match=message) as caught:
        Preprocess.translate(given)
    assert "\n" not in str(caught.value)


def test_one_that_is_one_stays_itself_and_survives_json():
    made = Preprocess((20, 30), "pad", 0.9, MEAN, STD, 3, "bicubic")
    assert Preprocess.translate(made) is made
    assert Preprocess.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert Preprocess.from_json(Preprocess(8).to_json()) == Preprocess((8, 8))
    entry = {"kind": "image", "shape": [3, 20, 30], "scaling": "any text"} | made.to_json()
    assert Preprocess.from_contract(entry) == made


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "lacks 'size'"),
        ({"size": 8, "crops": 1}, "no 'crops'; did you mean 'crop'"),
        ({"size": 10**6}, "at most 8192"),
        ({"size": [8, 8, 8]}, "size must be"),
        ({"size": 8, "crop": 0}, "crop must be"),
        ({"size": 8, "crop": float("nan")}, "crop must be"),
        ({"size": 8, "crop": True}, "crop must be"),
        ({"size": 8, "interpolation": "cubic"}, "interpolation must be"),
        ({"size": 8, "interpolation": ["box"]}, "interpolation must be"),
        ({"size": 8, "resize": "squash"}, "resize must be"),
        ({"size": 8, "channels": 4}, "channels must be"),
        ({"size": 8, "mean": MEAN}, "belong together"),
        ({"size": 8, "mean": [0.5], "std": [1.0]}, "mean must be 3"),
        ({"size": 8, "mean": MEAN, "std": [1, 1, 0]}, "std must be above 0"),
        ({"size": 8, "mean": MEAN, "std": [1, 1, float("inf")]}, "std must be 3 finite"),
        ({"size": 8, "mean": "abc", "std": MEAN}, "mean must be 3"),
        ([8], "mapping"),
    ],
)
def test_a_description_from_elsewhere_is_checked(mapping, message):
    with pytest.raises(InputError, match=message) as caught:
        Preprocess.from_json(mapping)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("preprocess", [Preprocess(16), Preprocess((9, 16), crop=0.8), Preprocess(16, channels=1)])
def test_all_roads_lead_to_the_same_pixels(preprocess, tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (21, 33, 3), np.uint8)
    image = Image.fromarray(array)
    image.save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    items = [str(tmp_path / "a.png"), tmp_path / "a.png", content, image, array, torch.from_numpy(array)]
    items += [torch.from_numpy(array).permute(2, 0, 1)]  # as torch has images
    found = preprocess.stack(items)
    assert found.dtype == np.uint8 and found.shape == (7, *preprocess.shape[1:], preprocess.channels)
    assert (found == found[0]).all()
    ways = {"resize": preprocess.resize, "crop": preprocess.crop, "interpolation": preprocess.interpolation}
    files = ImageFiles(["a.png"], root=tmp_path).with_size(preprocess.size, preprocess.channels, **ways)
    assert np.array_equal(files.read(np.array([0])), found[:1])
    with pytest.raises(InputError, match="got float"):
        preprocess.decode(1.0)
    with pytest.raises(InputError, match="no images"):
        preprocess.stack([])


@pytest.mark.parametrize("turn", [2, 3, 5, 6, 8])
def test_a_turned_photograph_is_cropped_as_it_is_looked_at(turn):
    array = np.random.default_rng(2).integers(0, 256, (21, 34, 3), np.uint8)
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    Image.fromarray(array).save(buffer, "PNG", exif=exif)
    upright = {2: array[:, ::-1], 3: array[::-1, ::-1], 5: array.transpose(1, 0, 2)}
    upright |= {6: np.rot90(array, -1), 8: np.rot90(array)}
    made = Preprocess((15, 12), crop=0.85)
    assert np.array_equal(made.decode(buffer.getvalue()), made.decode(np.ascontiguousarray(upright[turn])))


def test_a_sliver_of_an_image_does_not_fill_the_memory():
    sliver = np.zeros((1, 2_000_000, 3), np.uint8)  # scaled as a whole it would have 10^12 pixels
    assert Preprocess(512, crop=0.5).decode(sliver).shape == (512, 512, 3)


def test_crop_and_interpolation_are_part_of_the_fingerprint(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    usual = ImageFiles(["a.png"], 8, root=tmp_path)
    others = [usual.with_size(crop=1.0), usual.with_size(crop=0.5), usual.with_size(interpolation="bicubic")]
    assert len({inputs.fingerprint() for inputs in [usual, *others]}) == 4
    assert others[1].take(np.array([0])).crop == others[1].with_size(4).crop == 0.5


def test_a_crop_of_an_image_of_the_wanted_size_still_crops():
    array = np.random.default_rng(3).integers(0, 256, (1, 8, 8, 3), np.uint8)
    assert not np.array_equal(ImageArray(array, 8, crop=0.5).array, array)
    assert np.array_equal(ImageArray(array, 8, crop=1.0).array, array)
    buffer = io.BytesIO()
    Image.fromarray(array[0]).save(buffer, "PNG")
    assert np.array_equal(decode_image(buffer.getvalue(), size=8, crop=0.5), ImageArray(array, 8, crop=0.5).array[0])
