"""The tables of a recipe: their keys, what these may be, and their defaults."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Table(BaseModel):
    """A table of a recipe: frozen, no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Data(Table):
    """Where samples come from and how they are split."""

    source: str = "glyphs"
    size: int | list[int] | None = None  # side in pixels, or [height, width]; None: one that fits, see auto_settings
    resize: Literal["crop", "pad", "stretch"] | None = None  # how pictures get that size; None: crop from the centre
    channels: Literal[1, 3] | None = None
    label: str | None = None  # column names, where the source has columns
    domain: str | None = None
    groups: list[str] | None = None
    features: list[str] | None = None  # of a table: which columns are inputs
    categories: list[str] | None = None  # of those, which hold names even where they look like numbers
    missing: Literal["fail", "mean"] | None = None  # what an empty cell is
    text: Literal["onehot", "code"] | None = None  # how names become inputs
    image: str | None = None  # the column of picture files, where it has an unusual name
    policy: Literal["fail", "skip"] = "fail"  # unreadable pictures
    memory: float = Field(2.0, ge=0)  # GiB that decoded pictures may take; more of them are decoded when they are read
    val: float = Field(0.1, ge=0, lt=1)  # shares of the identities, for a source without a split
    test: float = Field(0.3, gt=0, lt=1)
    unseen: list[str] = []  # domains to keep out of training and to probe with
    pairs: str | None = None  # a table of pairs of the source, or "same-class" (method similarity)
    triplets: str | None = None  # a table of triplets instead

    @field_validator("size", mode="plain")
    @classmethod
    def _sides(cls, value: Any) -> int | list[int] | None:
        """By hand: of a value that may be of two kinds a library reports two problems."""
        sides = list(value) if isinstance(value, list | tuple) else [value, value]
        if value is not None and (len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides)):
            raise ValueError("a side in pixels is wanted, or [height, width]")
        return sides if isinstance(value, list | tuple) else value


class Batches(Table):
    """What one step sees."""

    classes: int = Field(64, ge=2)
    samples: int = Field(4, ge=2)
    size: int | None = Field(None, ge=2)  # of batches of samples, pairs or triplets; None: classes x samples
    views: int = Field(1, ge=1, le=8)
    augment: str = "mild"
    workers: int = Field(0, ge=0)  # processes that decode; 0 when the pictures fit into memory


class Optimise(Table):
    """How parameters move."""

    method: Literal["supervised", "similarity", "two-encoder", "hardness-aware", "jtt"] = "supervised"
    steps: int = Field(400, ge=1)
    rate: float = Field(2e-3, gt=0)  # highest learning rate
    warmup: float = Field(0.2, ge=0, lt=1)  # share of the steps in which it rises; then it falls as a cosine
    loss_rate: float = Field(1.0, gt=0)  # times that, for parameters of the loss: class vectors are met more seldom
    class_vectors: Literal["means", "random"] = "means"  # where those start: class means of the untrained network
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(0.0, ge=0)  # largest gradient norm; 0 for no limit
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    checkpoint_every: int = Field(100, ge=1)
    log_every: int = Field(10, ge=1)
    collapse_spread: float = Field(0.01, ge=0, lt=1)  # stop below this share of the first batch's 1 - mean cosine
    collapse_gap: float = Field(0.02, ge=0, lt=1)  # stop where positives are closer than negatives by less; 0 never
    collapse_patience: int = Field(5, ge=1)  # log lines after the warm-up that must show it


class Biased(Table):
    """The second encoder of a loss with a ``Relative`` difficulty (method two-encoder)."""

    loss: dict[str, Any] = {"kind": "SelfTriplet"}
    rate: float = Field(1.0, gt=0)  # times train.rate
    weights: Literal["pairs", "mean", "shuffled"] = "pairs"  # the last two are controls


class Twice(Table):
    """The two stages of method jtt."""

    first: float = Field(0.25, gt=0, le=1)  # steps of the first classifier, as a share of train.steps
    copies: int = Field(5, ge=0)  # more of every sample that it gets wrong; 0 = an ordinary classifier, one stage


class Judge(Table):
    """What is measured afterwards."""

    fars: list[Annotated[float, Field(gt=0, lt=1)]] = Field([1e-1, 1e-2, 1e-3], min_length=1)
    ks: list[Annotated[int, Field(ge=1)]] = Field([1, 2, 4, 8], min_length=1)
    baselines: bool = True  # also raw inputs and the untrained network
    spurious: str | None = None  # a column that a model may fall for: background, colour, device
    probe: bool | None = None  # probes of frozen features; None: of closed sets, of two-encoder and jtt, with spurious
    probe_samples: int = Field(5000, ge=10)  # of the training split, that probes are fitted on at most

    @field_validator("fars", "ks", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        """One number is a list of one."""
        return [value] if type(value) in (int, float) else value
