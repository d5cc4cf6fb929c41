"""The card of a run as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(facts: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    names = [way["name"] for way in facts["scenarios"]]
    lines = [f"# {_plain(facts['title'])}", "", _plain(facts["about"]), ""]
    if facts["warnings"]:
        lines += [*(_warning(text, text == facts["verdict"]) for text in facts["warnings"]), ""]
    lines += ["## Headline", "", f"95 % intervals over test identities; {facts['headline']}.", ""]
    lines += _table(["", "value", "interval"], [[t["name"], t["text"], t["interval"]] for t in facts["tiles"]])
    lines += ["## All numbers", ""]
    shown = [[row["name"], *(_joined(cell) for cell in row["cells"])] for row in facts["rows"]]
    lines += _table(["", *names], shown)
    if facts["thresholds"]:
        lines += ["## Thresholds", "", "Accept a pair when its cosine is at least the threshold.", ""]
        head = ["FAR wanted", "threshold", "measured on", *(f"{name}: FAR, TAR on test" for name in names)]
        body = [
            [t["far"], t["threshold"], t["measured_on"], *(f"{p['far']}, {p['tar']}" for p in t["test"])]
            for t in facts["thresholds"]
        ]
        lines += _table(head, body)
    lines += _probes(facts["probe"])
    lines += ["## Again", "", "```sh", *(f"{c['line']}  # {c['what']}" for c in facts["commands"]), "```", ""]
    lines += ["## Recipe", "", "```toml", facts["recipe"].rstrip(), "```", "", "## Provenance", ""]
    lines += [f"- {name}: `{value}`" for name, value in facts["provenance"]]
    return "\n".join(lines) + "\n"


def _warning(text: str, decisive: bool) -> str:
    """A warning as a quotation; one that decides about all the rest is bold."""
    return f"> **{_plain(text)}**\n>" if decisive else f"> **Warning.** {_plain(text)}\n>"


def _probes(found: Mapping[str, Any] | None) -> list[str]:
    """What probes read from frozen features, as Markdown."""
    if found is None:
        return []
    lines = ["## Probes", "", _plain(found["about"]), ""]
    for target in [*found["targets"], *found["groups"]]:
        status = "" if target["rows"] else f": {_plain(target['status'])}"
        lines += [f"**{_plain(target['title'])}**{status}", ""]
        if target["rows"]:
            body = [[row["name"], *map(_joined, row["cells"])] for row in target["rows"]]
            lines += _table(["", *target["columns"]], body)
        lines += [*(f"- {_plain(text)}" for text in target.get("notes", [])), ""]
    return lines


def _joined(cell: Mapping[str, Any]) -> str:
    return f"{cell['text']} ({cell['interval']})" if cell["interval"] else cell["text"]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    marks = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(_plain(cell) for cell in row)} |" for row in (head, marks, *body)] + [""]


def _plain(text: str) -> str:
    """Text that cannot break out of a Markdown line or cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
