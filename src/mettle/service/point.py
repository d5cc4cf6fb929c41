"""Where a service answers: the rate or the threshold that its operator chose, and what the gallery makes of it now.

Another process may calibrate the gallery while the service runs, so nothing of it is kept from the start.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mettle.errors import GalleryError, InputError
from mettle.gallery.results import Verified
from mettle.gallery.thresholds import Operating

if TYPE_CHECKING:
    from mettle.gallery.gallery import Gallery

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
