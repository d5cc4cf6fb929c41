"""The work behind the routes: plain functions that run in a thread, ask the gallery and write the audit log.

They fail closed. Whatever goes wrong leaves as an error before an answer exists; a verdict is "match" only where the
gallery said so and the audit log has it on disk.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mettle.errors import (
    DataError,
    GalleryError,
    GalleryUnavailable,
    InputError,
    MettleError,
    NumericError,
    OutcomeUnknown,
    UnknownIdentity,
)
from mettle.gallery.enrolment import name_spellings
from mettle.gallery.gallery import MAX_RESULTS
from mettle.gallery.results import Candidate, IdentifyResult, Receipt, VerifyResult, verdict_text
from mettle.gallery.thresholds import DecisionThreshold
from mettle.service.auth import Key
from mettle.service.errors import ApiError
from mettle.service.request_body import check_image_format, to_picture_error
from mettle.service.schemas import CandidateAnswer, ChangeAnswer, EmbedAnswer, IdentifyAnswer, InfoAnswer, VerifyAnswer

if TYPE_CHECKING:
    from mettle.gallery.gallery import Gallery
    from mettle.service.app import ServiceContext


def embed_images(context: "ServiceContext", pictures: Sequence[bytes]) -> np.ndarray:
    """(n, dim) embeddings of encoded pictures."""
    if not context.pictures:
        why = "this gallery has no model for pictures: send embeddings to /v1, or serve a gallery of a run of pictures"
        raise ApiError(422, "no-model", why)
    end = time.monotonic() + context.limits.work_seconds
    found = []
    for picture in pictures:
        if time.monotonic() > end:
            raise ApiError(503, "timeout", "the pictures take too long; send fewer at a time", retry_after=5)
        found.append(_embed_image(context, picture))
    return np.concatenate(found)


def _embed_image(context: "ServiceContext", picture: bytes) -> np.ndarray:
    check_image_format(picture)
    try:
        with context.readers.active():  # it is decoded, to the size that the model takes, in another process
            return context.gallery.embed([picture])
    except DataError as error:
        raise to_picture_error(error, context.limits) from None
    except (InputError, NumericError):  # the picture is sound by now: what came out of the model is not
        why = "the model finds nothing in a picture (its embedding is zero, NaN or infinite): send another"
        raise ApiError(422, "bad-image", why) from None


def verify(context: "ServiceContext", key: Key, identity: str, probe: np.ndarray) -> VerifyAnswer:
    """Is it them? Nobody of that name answers like somebody else of that name."""
    full = key.qualified_name(identity)
    try:
        # Without suggestions: looking for the nearest name takes time, which would tell whether this one is anybody's.
        found = context.threshold.call(context.gallery.verify, full, probe, suggest=False)
    except UnknownIdentity:
        found = no_match_result(full, context.threshold.current())
    else:
        if not found.match:
            context.threshold.current()  # as long as for a name that is nobody's: the time must not tell
    match = found.match is True and math.isfinite(found.score)
    _record_verdict(context, key, "verify", match, found.threshold, full)
    # A key that may only verify cannot learn from a failed try who is enrolled, or in which direction to improve.
    seen = math.isfinite(found.score) and (match or key.allows("identify"))
    return VerifyAnswer(
        identity=identity,
        match=match,
        verdict=verdict_text(identity if match else None, found.threshold),
        score=_round_score(context, found.score) if seen else None,
        threshold=found.threshold,
        far=found.far,
        per=found.per,
        false_accepts=found.false_accepts if seen else None,
        basis=_describe_basis(key, found.per, found.basis),
    )


def identify(context: "ServiceContext", key: Key, probe: np.ndarray, k: int) -> IdentifyAnswer:
    """Who is it, if anybody that this key may know of?"""
    found, own = _own_candidates(context, key, probe, min(k, context.limits.k))
    best = next((c.identity for c in own if c.match is True and math.isfinite(c.score)), None)
    whom = None if best is None else key.qualified_name(best)
    _record_verdict(context, key, "identify", best is not None, found.threshold, whom)
    return IdentifyAnswer(
        match=best,
        verdict=verdict_text(best, found.threshold),
        candidates=[
            CandidateAnswer(identity=c.identity, score=_round_score(context, c.score), match=c.match)
            for c in own
            if math.isfinite(c.score)
        ],
        threshold=found.threshold,
        far=found.far,
        per=found.per,
        false_matches=found.false_matches if key.tenant is None else None,
        basis=_describe_basis(key, found.per, found.basis),
    )


def enrol(
    context: "ServiceContext", key: Key, identity: str, vectors: np.ndarray, request: str | None, replace: bool
) -> ChangeAnswer:
    """Add templates, unless one of them is a wolf."""
    full = key.qualified_name(identity)
    _refuse_wolves(context, full, vectors)
    name = _qualified_request(key, request)
    receipt = _change(
        *(context, key, "enrol", full, "enrolled"),
        lambda: context.gallery.enrol(full, vectors, request=name, replace=replace),
    )
    return ChangeAnswer(
        identity=identity,
        templates=len(receipt.numbers),
        skipped=receipt.skipped,
        sequence=receipt.sequence,
        repeated=bool(receipt.repeated),
    )


def delete(context: "ServiceContext", key: Key, identity: str, request: str | None) -> ChangeAnswer:
    """Forget an identity."""
    full = key.qualified_name(identity)
    name = _qualified_request(key, request)
    receipt = _change(
        *(context, key, "delete", full, "deleted"),
        lambda: context.gallery.delete(full, request=name, suggest=False),
    )
    return ChangeAnswer(
        identity=identity, templates=len(receipt.numbers), sequence=receipt.sequence, repeated=bool(receipt.repeated)
    )


def embed(context: "ServiceContext", key: Key, pictures: Sequence[bytes]) -> EmbedAnswer:
    """Embeddings, for the few keys that may have them."""
    vectors = embed_images(context, pictures)
    if not np.isfinite(vectors).all():
        raise ApiError(422, "bad-image", "the model has no embedding for a picture")
    _record(context, key, "embed", f"embedded {len(vectors)}", None)
    binding = context.gallery.binding
    return EmbedAnswer(embeddings=vectors.astype(float).tolist(), dim=binding.dim, model=binding.model)


def info(context: "ServiceContext", key: Key) -> InfoAnswer:
    """What this service takes; how much it holds is told to keys without a tenant only."""
    facts, at, binding, limits = (
        context.gallery.info(),
        context.threshold.current(),
        context.gallery.binding,
        context.limits,
    )
    alone = key.tenant is None
    names = ("body", "json", "pixels", "parts", "templates", "k", "read_seconds", "body_seconds", "work_seconds")
    return InfoAnswer(
        dim=binding.dim,
        metric=binding.metric,
        fusion=binding.fusion,
        model=binding.model,
        images=context.pictures,
        identities=facts.identities if alone else None,
        templates=facts.templates if alone else None,
        index=str(facts.index.get("kind")) if facts.index.get("kind") else None,
        threshold=at.threshold,
        far=at.far,
        per=at.counts,
        basis=_describe_basis(key, at.counts, at.basis),
        runs=[run.name for run in context.runs],
        scopes=list(key.scopes),
        limits={name: float(getattr(limits, name)) for name in names},
    )


def _own_candidates(
    context: "ServiceContext", key: Key, probe: np.ndarray, k: int
) -> tuple[IdentifyResult, list[Candidate]]:
    """The k best of this key's tenant: all tenants share one index, so look deeper until there are enough."""
    deep = min(MAX_RESULTS, k if key.tenant is None else max(4 * k, 64))
    while True:
        found = context.threshold.call(context.gallery.identify, probe, k=deep)
        own = [
            Candidate(name, c.score, c.match)
            for c in found.candidates
            if (name := key.local_name(c.identity)) is not None
        ]
        if key.tenant is None or len(own) >= k or len(found.candidates) < deep or deep == MAX_RESULTS:
            return found, own[:k]
        deep = min(MAX_RESULTS, 8 * deep)


def _describe_basis(key: Key, per: str | None, basis: str) -> str:
    """On what a threshold rests. A calibration tells how many are enrolled, and by going stale lets them be counted by
    whoever enrols until it does: no tenant's to know.
    """
    return "measured on the people enrolled" if key.tenant is not None and per == "person" else basis


def _refuse_wolves(context: "ServiceContext", full: str, vectors: np.ndarray) -> None:
    """A template that looks like many people opens many doors: it is never enrolled."""
    most, own = context.limits.max_wolf_matches, name_spellings(full)
    for found in context.threshold.call(context.gallery.identify_many, vectors, k=most + 2):
        if sum(c.match and c.identity not in own for c in found.candidates) > most:
            raise ApiError(409, "quarantined", "a template matches too many other identities and was not enrolled")


def _qualified_request(key: Key, request: str | None) -> str | None:
    """A request's name belongs to its key: two keys may use the same one without meeting."""
    return None if request is None else f"{key.id}:{request}"


def _record_verdict(
    context: "ServiceContext", key: Key, what: str, match: bool, threshold: float | None, full: str | None
) -> None:
    """Into the audit log and the metrics: a verdict without a name."""
    outcome = "match" if match else verdict_text(None, threshold)
    _record(context, key, what, outcome, full)
    context.metrics.verdicts.labels(f"/v1/{what}", outcome).inc()


def _record(context: "ServiceContext", key: Key, what: str, outcome: str, full: str | None) -> None:
    if context.audit_log is not None:
        context.audit_log.append(key.name, what, outcome, subject=full)


def _change(
    context: "ServiceContext", key: Key, what: str, full: str, done: str, change: Callable[[], Receipt]
) -> Receipt:
    """Make a change that the audit log knows of before it is made, and after it how it ended.

    Where the second line cannot be written the change is made all the same, and so it is answered: the first line says
    that it was begun, and the next line that can be written says how many are missing.
    """

    def record_end(outcome: str) -> None:
        try:
            _record(context, key, what, outcome, full)
        except GalleryUnavailable:
            log.error("the audit log could not take how a change ended that it knows was begun: %s", what)

    _record(context, key, what, "begun", full)
    try:
        receipt = change()
    except MettleError as error:
        record_end("unknown" if isinstance(error, OutcomeUnknown) else "failed")
        raise
    record_end("repeated" if receipt.repeated else done)
    return receipt


def _round_score(context: "ServiceContext", score: float) -> float:
    return round(float(score), context.limits.digits)


T = TypeVar("T")
log = logging.getLogger("mettle.service")


@dataclass(frozen=True)
class ConfiguredThreshold:
    """The operator's choice; clients do not choose it."""

    gallery: "Gallery"
    far: float | None = None
    threshold: float | None = None

    def current(self) -> DecisionThreshold:
        """What it stands for at this moment."""
        try:
            return self.gallery.decision_threshold(far=self.far, threshold=self.threshold)
        except InputError as error:  # it was known at the start: the operator's to mend, not the client's
            log.error("the gallery has lost what this service answers at: %s", error)
            raise GalleryError(str(error)) from None

    def call(self, question: Callable[..., T], *given: Any, **more: Any) -> T:
        """What the gallery answers there."""
        try:
            return question(*given, **more, far=self.far, threshold=self.threshold)
        except InputError:
            self.current()  # raises where not the client is to blame
            raise


def no_match_result(identity: str, at: DecisionThreshold) -> VerifyResult:
    """The answer about a name that is nobody's."""
    return VerifyResult(identity, math.nan, at.threshold, at.far, False, 0, at.basis, per=at.counts)
