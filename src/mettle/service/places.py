"""Every place of the service, who may go there, and how; what is not listed here does not exist."""

from collections.abc import Mapping
from dataclasses import dataclass

ANY = "any"  # any key will do
PUBLIC = ""  # none is needed
SIGN_IN = "/workbench/session"


@dataclass(frozen=True)
class Place:
    """A route and the scope that each of its methods wants."""

    route: str
    scopes: Mapping[str, str]  # method -> scope
    cookie: bool = False  # a browser session may come here

    @property
    def whole(self) -> bool:
        """Whether it shows the whole gallery: then it wants the scope ``workbench`` too, and no key of a tenant."""
        return self.route.startswith("/workbench/")


_VERBS = ("GET", "HEAD", "POST")
PLACES = {
    place.route: place
    for place in (
        Place("/", {"GET": PUBLIC}),
        Place("/health", {"GET": PUBLIC}),
        Place("/docs", {"GET": PUBLIC}),
        Place("/openapi.json", {"GET": PUBLIC}),
        Place("/sign-in.js", {"GET": PUBLIC}),
        Place("/metrics", {"GET": "metrics"}),
        Place("/v1/info", {"GET": ANY}, cookie=True),
        Place("/v1/verify", {"POST": "verify"}, cookie=True),
        Place("/v1/identify", {"POST": "identify"}, cookie=True),
        Place("/v1/enrol", {"POST": "enrol"}),
        Place("/v1/delete", {"POST": "delete"}),
        Place("/v1/identities/{identity}", {"DELETE": "delete"}),
        Place("/v1/embed", {"POST": "embed"}),
        Place(SIGN_IN, {"POST": "workbench", "DELETE": "workbench"}, cookie=True),
        Place("/workbench/api/identify", {"POST": "identify"}, cookie=True),
        Place("/workbench/api/verify", {"POST": "verify"}, cookie=True),
        Place("/workbench/{page}", dict.fromkeys(_VERBS, "workbench"), cookie=True),
    )
}
_BELOW = {"/v1/identities/": "/v1/identities/{identity}", "/workbench/": "/workbench/{page}"}


def locate(path: str) -> Place | None:
    """The place that a path leads to."""
    if path in PLACES and "{" not in path:
        return PLACES[path]
    if path == "/workbench":
        return PLACES["/workbench/{page}"]
    return next((PLACES[route] for start, route in _BELOW.items() if path.startswith(start)), None)
