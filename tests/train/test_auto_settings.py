"""Settings that follow from the data: chosen and told where a shipped recipe leaves them open, kept with the run."""

import numpy as np
import pytest
from PIL import Image

from mettle.data.dataset import Samples
from mettle.data.inputs import ImageArray
from mettle.errors import DataError, RecipeError
from mettle.train import load, open_run_folder, train
from mettle.train.auto_settings import AUTO_KEYS, choose_image_size, measure_images
from mettle.train.datamodule import fill_settings, prepare_samples

QUICK = ["train.steps=2", "train.log_every=1", "evaluate.baselines=false"]


def write_pictures(folder, sizes, classes=6, each=4, seed=0):
    """Noise with a color for each class, in these (height, width) one after the other."""
    rng = np.random.default_rng(seed)
    number = 0
    for label in range(classes):
        color = rng.integers(0, 256, 3)
        (folder / f"class{label}").mkdir(parents=True)
        for _ in range(each):
            height, width = sizes[number % len(sizes)]
            pixels = (color + rng.normal(0, 30, (height, width, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number:03d}.png")
            number += 1
    return folder


@pytest.fixture
def mixed(tmp_path):
    return write_pictures(tmp_path / "mixed", [(80, 120), (100, 64), (96, 96)])


def test_a_folder_of_mixed_sizes_trains_without_any_setting(mixed, tmp_path):
    told: list[str] = []
    recipe = load("supcon", QUICK, data={"source": str(mixed)})
    outcome = train(recipe, tmp_path / "run", tensorboard=False, on_note=told.append)
    chosen = {note.split(" = ")[0].removeprefix("chose "): note for note in told if note.startswith("chose ")}
    assert set(chosen) == {"data.size", "data.resize", "batch.classes", "batch.augment", "model.backbone", "model.pool"}
    assert all(f"--set {key}=" in note for key, note in chosen.items())
    assert "3 sizes, the median short side is 80 pixels" in chosen["data.size"]
    kept = open_run_folder(tmp_path / "run").recipe
    assert kept == outcome.run.recipe
    assert (kept.data.size, kept.data.resize, kept.auto) == (64, "crop", [])
    assert kept.batch.classes == 3  # of 6 classes one validates and two test
    assert (kept.batch.augment, kept.model["pool"]) == ("photo", "gem")
    assert outcome.run.contract()["input"]["resize"] == "crop"
    assert outcome.model.shape == (3, 64, 64)


def test_its_data_are_recognized_and_it_can_be_resumed_by_the_name_of_its_recipe(mixed, tmp_path):
    recipe = load("supcon", QUICK, data={"source": str(mixed)})
    first = train(recipe, tmp_path / "run", tensorboard=False)
    assert first.run.matches_data(prepare_samples(first.run.recipe_with_data_paths()).fingerprint())
    again = train(recipe, tmp_path / "run", tensorboard=False, resume=True)
    assert again.resumed_from == 2


def test_what_somebody_wrote_is_never_replaced(mixed, tmp_path):
    overrides = [*QUICK, "data.size=[32,48]", "data.resize=pad", "batch.augment=mild", "model.pool=average"]
    overrides.append("model.backbone=convnet")
    recipe = load("supcon", [*overrides, "batch.classes=2"], data={"source": str(mixed)})
    told: list[str] = []
    kept = train(recipe, tmp_path / "run", tensorboard=False, on_note=told.append).run.recipe
    assert not [note for note in told if note.startswith("chose ")]
    assert (kept.data.size, kept.data.resize, kept.batch.augment) == ([32, 48], "pad", "mild")
    assert (kept.model["pool"], kept.batch.classes) == ("average", 2)
    with pytest.raises(DataError, match="batches of 64 classes need as many classes"):
        train(load("supcon", [*QUICK, "batch.classes=64"], data={"source": str(mixed)}), tmp_path / "no")


def test_two_views_take_no_more_samples_than_there_are(mixed, tmp_path):
    recipe = load("simclr", QUICK, data={"source": str(mixed)})
    assert train(recipe, tmp_path / "run", tensorboard=False).run.recipe.batch.size == 12


def test_a_file_of_ones_own_keeps_every_key_that_it_has(mixed, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[batch]\naugment = "mild"\n[loss]\nkind = "SupCon"\n[train]\nsteps = 1\n')
    recipe = load(own, data={"source": str(mixed)})
    assert recipe.auto == [key for key in AUTO_KEYS if key != "batch.augment"]
    kept = train(recipe, tmp_path / "run", tensorboard=False).run.recipe
    assert (kept.batch.augment, kept.data.size, kept.batch.classes) == ("mild", 64, 3)


def test_grey_files_are_read_in_grey_and_small_ones_are_not_mirrored(tmp_path):
    rng = np.random.default_rng(0)
    for label in range(6):
        (tmp_path / "chars" / f"c{label}").mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (28, 28), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "chars" / f"c{label}" / f"{number}.png")
    recipe = load("supcon", QUICK, data={"source": str(tmp_path / "chars")})
    outcome = train(recipe, tmp_path / "run", tensorboard=False)
    kept = outcome.run.recipe
    assert (kept.data.channels, kept.batch.augment, kept.model["pool"]) == (1, "mild", "flatten")
    assert outcome.model.shape == (1, 28, 28)
    assert outcome.run.matches_data(prepare_samples(outcome.run.recipe_with_data_paths()).fingerprint())


@pytest.mark.parametrize("name", ["similarity-ranking", "similarity-regression"])
def test_batches_of_pairs_and_triplets_follow_the_data_too(mixed, tmp_path, name):
    kept = train(load(name, QUICK, data={"source": str(mixed)}), tmp_path / "run", tensorboard=False).run.recipe
    assert kept.batch.size is not None and 2 <= kept.batch.size < 128


def test_what_was_set_is_not_told_as_a_choice(mixed, tmp_path):
    told: list[str] = []
    recipe = load("supcon", [*QUICK, "data.resize=pad"], data={"source": str(mixed)})
    train(recipe, tmp_path / "run", tensorboard=False, on_note=told.append)
    chosen = [note for note in told if note.startswith("chose ")]
    assert not [note for note in chosen if "data.resize =" in note]
    assert [note for note in chosen if "the whole image in evaluation" in note]


def test_one_small_size_stays_as_it_is_and_a_large_one_shrinks(tmp_path):
    small = write_pictures(tmp_path / "small", [(48, 40)])
    large = write_pictures(tmp_path / "large", [(160, 320)])
    recipe = load("supcon")
    assert choose_image_size(recipe, prepare_lazily(small), "cpu") == []
    (choice,) = choose_image_size(recipe, prepare_lazily(large), "cpu")
    assert (choice.key, choice.value) == ("data.size", [32, 64])
    (choice,) = choose_image_size(recipe, prepare_lazily(large), "cuda")
    assert choice.value == [64, 128]
    assert measure_images(prepare_lazily(large)).distinct == 1


def prepare_lazily(folder):
    from mettle.data.sources.image_folder import read_image_folder

    return read_image_folder(folder, policy="trust").inputs


def test_drawn_characters_keep_the_numbers_that_were_found_on_them():
    images = np.random.default_rng(0).integers(0, 256, (600, 32, 32), dtype=np.uint8)
    samples = Samples.of(ImageArray(images), np.arange(600) // 4, split=["train"] * 600, source_name="glyphs")
    recipe = load("supcon")
    kept, notes = fill_settings(recipe, samples)
    assert notes == ()
    assert (kept.model, kept.batch, kept.data, kept.auto) == (recipe.model, recipe.batch, recipe.data, [])


def test_keys_that_cannot_be_chosen_are_refused():
    with pytest.raises(RecipeError, match="'loss.kind' cannot be chosen from the data"):
        load("supcon", ['auto=["loss.kind"]'])
    assert load("supcon").auto == list(AUTO_KEYS)
    assert "batch.classes" not in load("supcon", ["batch.classes=8"]).auto


def test_whole_pictures_are_at_hand_for_random_crops(mixed):
    samples = prepare_samples(load("supcon", data={"source": str(mixed)}))
    assert isinstance(samples, Samples)
    canvas, aspect = samples.read_uncropped(np.arange(3))
    assert canvas.shape == (3, 96, 96, 3)
    assert aspect.tolist() == pytest.approx([1.5, 0.64, 1.0])


def test_files_that_cannot_be_read_are_told_when_training_begins(tmp_path):
    folder = write_pictures(tmp_path / "many", [(32, 32)], classes=6, each=20)
    (folder / "class0" / "torn.png").write_bytes(b"not a picture")
    told: list[str] = []
    recipe = load("supcon", QUICK, data={"source": str(folder)})
    run = train(recipe, tmp_path / "run", tensorboard=False, on_note=told.append).run
    assert run.recipe.data.policy == "skip" and run.matches_data(
        prepare_samples(run.recipe_with_data_paths()).fingerprint()
    )
    with pytest.raises(DataError, match="1 of 121 pictures cannot be used"):
        train(load("supcon", [*QUICK, "data.policy=fail"], data={"source": str(folder)}), tmp_path / "no")
    (note,) = [note for note in told if "left out" in note]
    said = "1 file that cannot be read was left out (--set data.policy=fail stops instead), first: cannot decode"
    assert note.startswith(said)


def test_where_class_vectors_start_says_nothing_to_other_losses():
    with pytest.raises(RecipeError, match="train.class_vectors changes nothing here: SupCon has no class vectors"):
        load("supcon", ["train.class_vectors=random"])
    assert load("arcface", ["train.class_vectors=random"]).train.class_vectors == "random"
