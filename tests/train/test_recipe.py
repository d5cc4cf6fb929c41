import tomllib

import pytest

from mettle.difficulty import Threshold
from mettle.errors import RecipeError
from mettle.losses import SupCon
from mettle.train.recipe import Recipe, load, parse, shipped


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_load_and_survive_a_round_trip(name):
    recipe = load(name)
    assert parse(tomllib.loads(recipe.toml())) == recipe
    assert "on " in recipe.title()


def test_supcon_and_da_supcon_differ_by_one_line():
    plain, aware = (shipped()[name].read_text().splitlines() for name in ("supcon", "da-supcon"))
    extra = [line for line in aware if line not in plain]
    assert len(extra) == 1 and extra[0].startswith("difficulty")
    assert [line for line in aware if line not in extra] == plain


def test_the_default_recipe_has_the_values_of_the_first_study():
    loss = load("da-supcon").criterion()
    assert loss == SupCon(0.05, difficulty=Threshold(alpha=1.0, beta=10.0, positive=0.7, negative=0.3))


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
    assert recipe.criterion().difficulty == Threshold(beta=5)


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
