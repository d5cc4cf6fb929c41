import tomllib

import pytest
import torch

from mettle import difficulty
from mettle.difficulty import MultiSimilarityMining, Threshold
from mettle.errors import RecipeError
from mettle.losses import SupCon
from mettle.train import prepare_samples
from mettle.train.recipe import Recipe, builtin_recipes, load, parse_recipe


@pytest.mark.parametrize("name", builtin_recipes())
def test_shipped_recipes_load_and_survive_a_round_trip(name):
    recipe = load(name)
    assert parse_recipe(tomllib.loads(recipe.to_toml())) == recipe
    assert "on " in recipe.title()


def test_supcon_and_da_supcon_differ_by_one_line():
    plain, aware = (builtin_recipes()[name].read_text().splitlines() for name in ("supcon", "da-supcon"))
    extra = [line for line in aware if line not in plain]
    assert len(extra) == 1 and extra[0].startswith("difficulty")
    assert [line for line in aware if line not in extra] == plain


def test_the_default_recipe_has_the_values_of_the_first_study():
    loss = load("da-supcon").build_loss()
    assert loss.settings == SupCon(0.05, difficulty=loss.difficulty).settings
    assert (loss.difficulty.alpha, loss.difficulty.beta) == (1.0, 10.0)


@pytest.mark.parametrize("common", [0.0, 8.0], ids=["spread", "nearly one direction"])
def test_the_default_recipe_chooses_the_closest_negatives_whatever_their_cosines(common):
    """Fixed thresholds, as it had, call every negative hard where an untrained network puts all samples together."""
    torch.manual_seed(0)
    y = torch.arange(48) // 4
    z = (torch.randn(12, 8)[y] + torch.randn(48, 8) + common).requires_grad_()
    loss = load("da-supcon").build_loss()
    loss(z, y)
    seen = loss.statistics(z, y)
    assert seen.hard_negatives == pytest.approx(0.01, abs=0.005)
    assert 0.3 < seen.hard_positives < 0.7


def test_class_defaults_are_untouched_by_the_recipe():
    assert SupCon().temperature == 0.1
    assert Threshold() == Threshold(alpha=1.0, beta=2.0, positive=0.7, negative=0.3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stesp=3", "did you mean 'steps'"),
        ("trian.steps=3", "did you mean 'train'"),
        ("loss.temprature=0.1", "did you mean 'temperature'"),
        ("loss.difficulty.alhpa=1", "did you mean 'alpha'"),
        ("loss.kind=SupCom", "did you mean 'SupCon'"),
        ("model.widht=3", "did you mean 'width'"),
        ("train.steps=many", "recipe key train.steps"),
        ("train.steps=0", "recipe key train.steps"),
        ("loss.temperature=-1", "temperature must be above 0"),
        ("loss.temperature=warm", "recipe key loss.temperature"),
        ("loss.difficulty.positive=1.5", "positive is a cosine"),
        ("loss.form=outer", "recipe key loss.form"),
        ("model.pool=max", "recipe key model.pool"),
        ("seed.deeper=1", "is a value, not a table"),
        ("steps", "table.key=value"),
        ("loss.difficulty=Threshold", 'a table such as { kind = "Threshold" }'),
        ("loss.difficulty=5", "recipe key loss.difficulty"),
        ("loss.difficulty=[1]", "recipe key loss.difficulty"),
        ("loss.difficulty={kind='Product', first='Hardest', second={kind='Threshold'}}", "loss.difficulty.first"),
        ("loss={kind='Center', base='Softmax'}", "--set loss.base.kind=Softmax"),
        ("evaluate.fars=[2]", "evaluate.fars.0"),
        ("evaluate.fars=[0.1, 0]", "evaluate.fars.1"),
        ("evaluate.fars=[]", "evaluate.fars"),
        ("evaluate.ks=[0]", "evaluate.ks.0"),
        ("evaluate.ks=[1, -2]", "evaluate.ks.1"),
        ("evaluate.ks=0", "evaluate.ks.0"),
        ("evaluate.ks=true", "evaluate.ks"),
        ("evaluate.fars=2", "evaluate.fars.0"),
        ("loss.temperature=inf", "recipe key loss.temperature: a finite number"),
        ("loss.difficulty.beta=nan", "recipe key loss.difficulty.beta: a finite number"),
        ("train.rate=-inf", "recipe key train.rate: a finite number"),
        ("evaluate.fars=[nan]", "recipe key evaluate.fars.0: a finite number"),
        ("seed=-1", "recipe key seed"),
        ("seed=9223372036854775807", "recipe key seed"),
        ("data.size=0", "recipe key data.size: a side in pixels"),
        ("data.size=[128, 64, 3]", "recipe key data.size: a side in pixels"),
        ("data.size=[128, 0]", "recipe key data.size: a side in pixels"),
        ("data.size=true", "recipe key data.size: a side in pixels"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_helps(override, message):
    with pytest.raises(RecipeError) as caught:
        load("da-supcon", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_are_typed_by_the_recipe_and_text_needs_no_quotes():
    recipe = load("supcon", ["train.steps=7", "data.source=some/folder", "loss.difficulty={kind='Threshold', beta=5}"])
    assert recipe.train.steps == 7
    assert recipe.data.source == "some/folder"
    assert recipe.build_loss().difficulty == Threshold(beta=5)


@pytest.mark.parametrize(
    "loss", ["loss.sample=0.1 loss.sparse=true", "loss={kind='Center',base={kind='ArcFace',sample=0.1,sparse=true}}"]
)
def test_gradients_that_the_optimiser_does_not_take_are_refused_before_anything_is_trained(loss):
    with pytest.raises(RecipeError, match="leave sparse out"):
        load("arcface", loss.split())
    assert load("arcface", ["loss.sample=0.1"]).build_loss(20).sample == 0.1


def test_a_size_may_have_two_sides():
    recipe = load("supcon", ["data.size=[128, 64]"])
    assert recipe.data.size == [128, 64]
    assert parse_recipe(tomllib.loads(recipe.to_toml())) == recipe
    assert load("supcon", ["data.size=32"]).data.size == 32


def test_one_rate_and_one_rank_are_lists_of_one():
    recipe = load("supcon", ["evaluate.fars=0.01", "evaluate.ks=3"])
    assert (recipe.evaluate.fars, recipe.evaluate.ks) == ([0.01], [3])
    assert parse_recipe(tomllib.loads(recipe.to_toml())) == recipe


@pytest.mark.parametrize("name", ["simclr", "jtt", "similarity-ranking"])
@pytest.mark.parametrize("key", ["batch.classes", "batch.samples"])
def test_an_override_that_would_change_nothing_is_refused(name, key):
    with pytest.raises(RecipeError, match=rf"{key} changes nothing here.*Set batch\.size instead"):
        load(name, [f"{key}=12"])
    assert load("supcon", [f"{key}=12"])  # there it counts


def test_a_folder_of_an_older_run_with_such_keys_still_opens(tmp_path):
    recipe = load("simclr")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml().replace("classes = 64", "classes = 12"))
    assert load(tmp_path / "recipe.toml").batch.classes == 12


def test_the_mark_that_some_editors_put_first_is_no_part_of_a_recipe(tmp_path):
    (tmp_path / "r.toml").write_bytes(b"\xef\xbb\xbf" + b"seed = 4\n")
    assert load(tmp_path / "r.toml").seed == 4


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'da-supcon'"):
        load("da-supcom")


def test_broken_toml_says_where(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text("[train\nsteps = 3")
    with pytest.raises(RecipeError, match="line 1"):
        load(file)


def test_a_recipe_is_frozen():
    with pytest.raises(Exception, match="frozen"):
        Recipe().seed = 3  # type: ignore[misc]


def test_how_a_table_is_read_can_be_said_in_a_recipe(tmp_path):
    table = tmp_path / "people.csv"
    table.write_text("age,zip,label\n" + "".join(f"{'' if i == 3 else i},{i % 2},p{i // 2}\n" for i in range(24)))
    data = {"source": str(table), "missing": "mean", "categories": ["zip"], "text": "onehot"}
    samples = prepare_samples(parse_recipe({**tomllib.loads(load("supcon").to_toml()), "data": data}))
    assert samples.inputs.names == ("age", "zip=0", "zip=1")


def test_the_recipe_of_the_multi_similarity_loss_mines_as_its_paper_does():
    loss = load("multi-similarity").build_loss()
    assert loss.difficulty == MultiSimilarityMining(0.1) and loss.empty == "zero"


@pytest.mark.parametrize("kind", sorted(set(difficulty.__all__) - {"Product", "Relative", "curriculum"}))
def test_every_difficulty_can_stand_in_a_recipe(kind):
    loss = load("supcon", [f"loss.difficulty.kind={kind}"]).build_loss()
    assert type(loss.difficulty).__name__ == kind


def test_the_recipe_of_photographs_lists_what_it_leaves_open_and_a_written_key_is_not_among_it():
    """Its augmentation is its own: crops are milder than those that photographs get where a recipe leaves them open."""
    assert "batch.augment" not in load("photos").auto and "batch.classes" in load("photos").auto
    assert "batch.classes" not in load("photos", ["batch.classes=8"]).auto
    assert load("photos").batch.augment == "large"
