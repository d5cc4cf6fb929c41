"""The work behind the routes: plain functions that run in a thread, ask the gallery and write the trail.

They fail closed. Whatever goes wrong leaves as an error before an answer exists; a verdict is "match" only where the
gallery said so and the trail has it on disk.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mettle.errors import GalleryError, InputError, NumericError, UnknownIdentity
from mettle.gallery.enrolment import spellings
from mettle.gallery.gallery import MAX_RESULTS
from mettle.gallery.results import Candidate, Identified, Verified, verdict
from mettle.gallery.thresholds import Operating
from mettle.service.auth import Key
from mettle.service.errors import Refusal
from mettle.service.request_body import pixels
from mettle.service.schemas import CandidateAnswer, ChangeAnswer, EmbedAnswer, IdentifyAnswer, InfoAnswer, VerifyAnswer

if TYPE_CHECKING:
    from mettle.gallery.gallery import Gallery
    from mettle.service.app import State


def embedded(state: "State", pictures: Sequence[bytes]) -> np.ndarray:
    """(n, dim) embeddings of encoded pictures."""
    if not state.pictures:
        why = "this gallery has no model for pictures: send embeddings to /v1, or serve a gallery of a run of pictures"
        raise Refusal(422, "no-model", why)
    # One by one: a decoded picture may take 200 MB, and a request may bring many.
    return np.concatenate([_embedded(state, pixels(picture, state.limits)) for picture in pictures])


def _embedded(state: "State", picture: np.ndarray) -> np.ndarray:
    try:
        return state.gallery.embed([picture])
    except (InputError, NumericError):  # the picture is sound by now: what came out of the model is not
        why = "the model finds nothing in a picture (its embedding is zero, NaN or infinite): send another"
        raise Refusal(422, "bad-image", why) from None


def verify(state: "State", key: Key, identity: str, probe: np.ndarray, *, route: str = "/v1/verify") -> VerifyAnswer:
    """Is it them? Nobody of that name answers like somebody else of that name."""
    full = key.full(identity)
    try:
        # Without suggestions: looking for the nearest name takes time, which would tell whether this one is anybody's.
        found = state.point.ask(state.gallery.verify, full, probe, suggest=False)
    except UnknownIdentity:
        found = nobody(full, state.point.now())
    else:
        if not found.match:
            state.point.now()  # takes a while on a server: a miss must not tell by it whether the name is anybody's
    match = found.match is True and math.isfinite(found.score)
    _tell(state, key, "verify", _outcome(match, found.threshold), full, route)
    # A key that may only verify cannot learn from a failed try who is enrolled, or in which direction to improve.
    seen = math.isfinite(found.score) and (match or key.allows("identify"))
    return VerifyAnswer(
        identity=identity,
        match=match,
        verdict=verdict(identity if match else None, found.threshold),
        score=_rounded(state, found.score) if seen else None,
        threshold=found.threshold,
        far=found.far,
        per=found.per,
        false_accepts=found.false_accepts if seen else None,
        basis=_basis(key, found.per, found.basis),
    )


def identify(state: "State", key: Key, probe: np.ndarray, k: int, *, route: str = "/v1/identify") -> IdentifyAnswer:
    """Who is it, if anybody that this key may know of?"""
    found, own = _candidates(state, key, probe, min(k, state.limits.k))
    best = next((c.identity for c in own if c.match is True and math.isfinite(c.score)), None)
    whom = None if best is None else key.full(best)
    _tell(state, key, "identify", _outcome(best is not None, found.threshold), whom, route)
    return IdentifyAnswer(
        match=best,
        verdict=verdict(best, found.threshold),
        candidates=[
            CandidateAnswer(identity=c.identity, score=_rounded(state, c.score), match=c.match)
            for c in own
            if math.isfinite(c.score)
        ],
        threshold=found.threshold,
        far=found.far,
        per=found.per,
        false_matches=found.false_matches if key.tenant is None else None,
        basis=_basis(key, found.per, found.basis),
    )


def enrol(
    state: "State", key: Key, identity: str, vectors: np.ndarray, request: str | None, replace: bool
) -> ChangeAnswer:
    """Add templates, unless one of them is a wolf."""
    full = key.full(identity)
    _refuse_wolves(state, full, vectors)
    _tell(state, key, "enrol", "begun", full)
    receipt = state.gallery.enrol(full, vectors, request=_own_request(key, request), replace=replace)
    _tell(state, key, "enrol", "repeated" if receipt.repeated else "enrolled", full)
    return ChangeAnswer(
        identity=identity,
        templates=len(receipt.numbers),
        skipped=receipt.skipped,
        sequence=receipt.sequence,
        repeated=bool(receipt.repeated),
    )


def delete(state: "State", key: Key, identity: str, request: str | None) -> ChangeAnswer:
    """Forget an identity."""
    full = key.full(identity)
    _tell(state, key, "delete", "begun", full)
    receipt = state.gallery.delete(full, request=_own_request(key, request), suggest=False)
    _tell(state, key, "delete", "repeated" if receipt.repeated else "deleted", full)
    return ChangeAnswer(
        identity=identity, templates=len(receipt.numbers), sequence=receipt.sequence, repeated=bool(receipt.repeated)
    )


def embed(state: "State", key: Key, pictures: Sequence[bytes]) -> EmbedAnswer:
    """Embeddings, for the few keys that may have them."""
    vectors = embedded(state, pictures)
    if not np.isfinite(vectors).all():
        raise Refusal(422, "bad-image", "the model has no embedding for a picture")
    _tell(state, key, "embed", f"embedded {len(vectors)}", None)
    binding = state.gallery.binding
    return EmbedAnswer(embeddings=vectors.astype(float).tolist(), dim=binding.dim, model=binding.model)


def info(state: "State", key: Key) -> InfoAnswer:
    """What this service takes; how much it holds is told to keys without a tenant only."""
    facts, at, binding, limits = state.gallery.info(), state.point.now(), state.gallery.binding, state.limits
    alone = key.tenant is None
    names = ("body", "pixels", "parts", "templates", "k", "body_seconds", "work_seconds")
    return InfoAnswer(
        dim=binding.dim,
        metric=binding.metric,
        fusion=binding.fusion,
        model=binding.model,
        images=state.pictures,
        identities=facts.identities if alone else None,
        templates=facts.templates if alone else None,
        index=str(facts.index.get("kind")) if facts.index.get("kind") else None,
        threshold=at.threshold,
        far=at.far,
        per=at.counts,
        basis=_basis(key, at.counts, at.basis),
        runs=[run.name for run in state.runs],
        scopes=list(key.scopes),
        limits={name: float(getattr(limits, name)) for name in names},
    )


def _candidates(state: "State", key: Key, probe: np.ndarray, k: int) -> tuple[Identified, list[Candidate]]:
    """The k best of this key's tenant: all tenants share one index, so look deeper until there are enough."""
    deep = min(MAX_RESULTS, k if key.tenant is None else max(4 * k, 64))
    while True:
        found = state.point.ask(state.gallery.identify, probe, k=deep)
        own = [Candidate(name, c.score, c.match) for c in found.candidates if (name := key.own(c.identity)) is not None]
        if key.tenant is None or len(own) >= k or len(found.candidates) < deep or deep == MAX_RESULTS:
            return found, own[:k]
        deep = min(MAX_RESULTS, 8 * deep)


def _basis(key: Key, per: str | None, basis: str) -> str:
    """On what a threshold rests. A calibration tells how many are enrolled, and by going stale lets them be counted by
    whoever enrols until it does: no tenant's to know.
    """
    return "measured on the people enrolled" if key.tenant is not None and per == "person" else basis


def _refuse_wolves(state: "State", full: str, vectors: np.ndarray) -> None:
    """A template that looks like many people opens many doors: it is never enrolled."""
    most, own = state.limits.wolf, spellings(full)
    for found in state.point.ask(state.gallery.identify_many, vectors, k=most + 2):
        if sum(c.match and c.identity not in own for c in found.candidates) > most:
            raise Refusal(409, "quarantined", "a template matches too many other identities and was not enrolled")


def _outcome(match: bool, threshold: float | None) -> str:
    """A verdict without a name, for the trail and the counters."""
    return "match" if match else verdict(None, threshold)


def _own_request(key: Key, request: str | None) -> str | None:
    """A request's name belongs to its key: two keys may use the same one without meeting."""
    return None if request is None else f"{key.id}:{request}"


def _tell(state: "State", key: Key, what: str, outcome: str, full: str | None, route: str | None = None) -> None:
    """Into the trail, and where it is a verdict, which ``route`` gives, into the counters."""
    if state.trail is not None:
        state.trail.append(key.name, what, outcome, subject=full)
    if route is not None:
        state.counters.count("mettle_verdicts_total", route=route, verdict=outcome)


def _rounded(state: "State", score: float) -> float:
    return round(float(score), state.limits.digits)


T = TypeVar("T")
log = logging.getLogger("mettle.service")


@dataclass(frozen=True)
class Point:
    """The operator's choice; clients do not choose it."""

    gallery: "Gallery"
    far: float | None = None
    threshold: float | None = None

    def now(self) -> Operating:
        """What it stands for at this moment."""
        try:
            return self.gallery.operating(far=self.far, threshold=self.threshold)
        except InputError as error:  # it was known at the start: the operator's to mend, not the client's
            log.error("the gallery has lost what this service answers at: %s", error)
            raise GalleryError(str(error)) from None

    def ask(self, question: Callable[..., T], *given: Any, **more: Any) -> T:
        """What the gallery answers there."""
        try:
            return question(*given, **more, far=self.far, threshold=self.threshold)
        except InputError:
            self.now()  # raises where not the client is to blame
            raise


def nobody(identity: str, at: Operating) -> Verified:
    """The answer about a name that is nobody's."""
    return Verified(identity, math.nan, at.threshold, at.far, False, 0, at.basis, per=at.counts)
