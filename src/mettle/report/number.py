"""Numbers as text, the same everywhere: value, interval, meaning."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.intervals import TOO_FEW

NONE = "–"
GAP = "\N{NO-BREAK SPACE}"

MEANING = {
    "EER": "error rate where false accepts equal false rejects; lower is better",
    "AUC": "chance that a genuine pair scores above an impostor pair",
    "Recall@1": "samples whose nearest neighbour is the right identity",
    "MAP@R": "how purely the nearest neighbours are the right identity",
}


def percent(value: float | None, digits: int = 2) -> str:
    """A share as text: ``4.36 %``."""
    return NONE if value is None else f"{100 * value:.{digits}f}{GAP}%"


def rate(value: float | None) -> str:
    """A wanted false-accept rate as text, as short as it can be: ``10 %``, ``0.1 %``."""
    return NONE if value is None else f"{float(f'{100 * value:.3g}'):.10g}{GAP}%"


def realised(value: float | None) -> str:
    """A measured rate as text, always three significant digits: ``11.0 %``, ``0.0268 %``."""
    return NONE if value is None else f"{100 * value:#.3g}".rstrip(".") + f"{GAP}%"


def called(scenario: str) -> str:
    """A scenario's name as readers see it."""
    return "all pairs" if scenario == "all" else scenario


def numbers(scenario: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All numbers of a scenario in reading order, each with its text, its interval and its meaning."""
    v, r = scenario["verification"], scenario["retrieval"]
    found = [
        _number("EER", v["eer"]["value"], v["eer"]["interval"], better="low"),
        _number("AUC", v["auc"]["value"], v["auc"]["interval"], form="{:.4f}"),
    ]
    for point in sorted(v["tar"], key=lambda p: -p["far"]):
        name = f"TAR at FAR {rate(point['far'])}"
        meaning = f"genuine pairs accepted when {rate(point['far'])} of impostor pairs are"
        entry = _number(name, point["tar"], point["interval"], digits=1)
        found.append(entry | {"far": point["far"], "status": point["status"], "meaning": meaning})
    named = {"r_precision": "R-precision", "map_at_r": "MAP@R"}
    for key, entry in r["metrics"].items():
        if key != "precision_at_1":  # the same as Recall@1
            name = named[key] if key in named else key.replace("recall@", "Recall@")
            found.append(_number(name, entry["value"], entry["interval"], digits=1))
    return found


def _number(
    name: str,
    value: float | None,
    interval: Mapping[str, Any] | None,
    *,
    better: str = "high",
    form: str = "",
    digits: int = 2,
) -> dict[str, Any]:
    """One number: as it is, and as text; shares in per cent unless a form is given."""
    factor, unit, form = (1, "", form) if form else (100, "%", f"{{:.{digits}f}}")
    text = NONE if value is None else form.format(factor * value) + (GAP + unit if unit else "")
    low, high = (interval["low"], interval["high"]) if interval else (None, None)
    extent = "" if value is None else ends(interval, form, factor, unit)
    known = {"value": value, "low": low, "high": high, "better": better, "meaning": MEANING.get(name, "")}
    return {"name": name, "text": text, "interval": extent, "status": "ok", **known}


def ends(interval: Mapping[str, Any] | None, form: str, factor: float = 100, unit: str = "%") -> str:
    """An interval of a number that is known as text, or why there is none."""
    return band(interval["low"], interval["high"], form, factor, unit) if interval else TOO_FEW


def told_once(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A number for a table, where the row of the EER says for all others why there are no intervals."""
    return {**entry, "interval": "" if entry["interval"] == TOO_FEW and entry["name"] != "EER" else entry["interval"]}


def band(low: float, high: float, form: str, factor: float, unit: str) -> str:
    """An interval as text: ``3.45–5.44 %``."""
    ends = f"{form.format(factor * low)}–{form.format(factor * high)}"
    return ends + (GAP + unit if unit else "")
