"""Numbers by name, some of them at a rate: ``"eer"``, ``"tar@1e-3"`` or ``("tar", 1e-3)``, ``"tpir@0.01"``."""

from collections.abc import Sequence

from mettle.errors import InputError, nearest


def named(name: str | tuple[str, float], known: Sequence[str]) -> tuple[str, float | None]:
    """A metric and its rate, None where it has none.

    Args:
        name: what was asked for.
        known: names that can be asked for; one with a rate in it needs one.
    """
    if isinstance(name, tuple) and len(name) == 2:
        metric, rate = name
    else:
        metric, _, text = str(name).partition("@")
        rate = _number(text, known) if text else None
    if (rate is not None) not in [bool(at) for one, at, _ in (k.partition("@") for k in known) if one == metric]:
        raise InputError(f"no interval named {name!r}{nearest(str(name), known)}")
    return metric, rate


def _number(text: str, known: Sequence[str]) -> float:
    try:
        return float(text)
    except ValueError:
        example = next((name for name in known if "@" in name), "")
        raise InputError(f"a rate must be a number, as in {example!r}: got {text!r}") from None
