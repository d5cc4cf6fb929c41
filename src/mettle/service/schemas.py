"""What goes in and out of the service, as JSON. Unknown fields are refused: there is no picture by address here."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field

FAR = "False-accept rate at the threshold, of what `per` says; null: not known."
THRESHOLD = (
    "The cosine from which on a score is a match; null: none was measured for this gallery and its operator gave none. "
    'Then nobody is a match, and the verdict is "not calibrated".'
)
VERDICT = '"match: " and who, "no match", or "not calibrated" where there is no threshold.'
PER = (
    'What `far` counts: a "comparison" of a probe with one template, or a "person" with all of theirs where the '
    "gallery is calibrated; null where `far` is."
)
IDENTITY = 120  # characters; with a tenant before it and four bytes each still within the storage's limit
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30)]
# One wrong number is enough to refuse a body: the others are not looked at.
Vector = Annotated[list[Number], Field(min_length=1, max_length=16_384), FailFast()]
Identity = Annotated[
    str, Field(min_length=1, max_length=IDENTITY, description="Any text of one line; never a path, never run.")
]
K = Annotated[int, Field(ge=1, description="How many candidates; no more than the service's limit are given.")]
Request = Annotated[
    str | None,
    Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$", description="A name for this change: sent twice, it happens once."),
]


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class VerifyQuestion(_In):
    """Is this who it claims to be?"""

    identity: Identity
    embedding: Vector


class IdentifyQuestion(_In):
    """Who is this?"""

    embedding: Vector
    k: K = 5


class Enrolment(_In):
    """Templates of one identity."""

    identity: Identity
    embeddings: Annotated[list[Vector], Field(min_length=1, max_length=1000), FailFast()]
    replace: bool = False
    request: Request = None


class Deletion(_In):
    """An identity to forget."""

    identity: Identity
    request: Request = None


class VerifyForm(BaseModel):
    """What goes with the picture of a verification."""

    identity: Identity


class IdentifyForm(BaseModel):
    """What goes with the picture of an identification."""

    k: K = 5


class EnrolForm(BaseModel):
    """What goes with the pictures of an enrolment."""

    identity: Identity
    replace: bool = False
    request: Request = None


class EmbedForm(BaseModel):
    """Nothing goes with pictures to embed."""


class VerifyAnswer(BaseModel):
    """A verdict about one identity."""

    identity: str
    match: bool
    verdict: str = Field(description=VERDICT)
    score: float | None = Field(description="Rounded; null where the key may not see scores that do not match.")
    threshold: float | None = Field(description=THRESHOLD)
    far: float | None = Field(description=FAR)
    per: str | None = Field(description=PER)
    false_accepts: float | None = Field(
        description="Largest share of strangers that are accepted as this person, whose templates and fusion rule it "
        "counts; null: not known, or hidden with the score."
    )
    basis: str


class CandidateAnswer(BaseModel):
    """Somebody whom the probe may be."""

    identity: str
    score: float
    match: bool


class IdentifyAnswer(BaseModel):
    """A verdict about everybody who is enrolled."""

    match: str | None
    verdict: str = Field(description=VERDICT)
    candidates: list[CandidateAnswer]
    threshold: float | None = Field(description=THRESHOLD)
    far: float | None = Field(description=FAR)
    per: str | None = Field(description=PER)
    false_matches: float | None = Field(
        description="Largest share of unknown probes that are given a name: it counts every template of everybody, and "
        "the fusion rule; null: not known, or not this key's to know."
    )
    basis: str


class ChangeAnswer(BaseModel):
    """An acknowledged change: it is on disk."""

    identity: str
    templates: int = Field(description="How many were added or removed.")
    skipped: int = Field(default=0, description="How many were not added, since the identity has them already.")
    sequence: int
    repeated: bool


class EmbedAnswer(BaseModel):
    """Embeddings of pictures, in the order of the parts."""

    embeddings: list[list[float]]
    dim: int
    model: str | None


class InfoAnswer(BaseModel):
    """What this service takes and holds."""

    dim: int
    metric: str
    fusion: str
    model: str | None
    images: bool = Field(description="Whether pictures are taken, or embeddings only.")
    identities: int | None = Field(description="null for a key with a tenant.")
    templates: int | None
    index: str | None
    threshold: float | None = Field(description=THRESHOLD)
    far: float | None = Field(description=FAR)
    per: str | None = Field(description=PER)
    basis: str
    runs: list[str]
    scopes: list[str]
    limits: dict[str, float]


class HealthAnswer(BaseModel):
    """Live: the process answers. Ready: so do the gallery, the audit log and whatever decodes pictures."""

    live: bool
    ready: bool


class Problem(BaseModel):
    """What went wrong."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """Any answer other than success. ``match`` is never true here: an error accepts nobody."""

    error: Problem
    match: None = None
