"""Pages of docs/results, written from the records of studies; what a person wrote under "What it says" stays."""

import json
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from benchmarks.evidence.table import (
    WITHDRAWN,
    Rows,
    difference,
    differences,
    levels,
    markdown,
    rows_of,
    shown,
    verdict,
)
from benchmarks.evidence.texts import PAGES, Page

FOLDER = Path(__file__).parents[2] / "docs" / "results"
SAYS = "## What it says"


def write_pages(files: list[Path], folder: Path = FOLDER) -> None:
    """A page for each record, the record itself beside it, and the index."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        record = json.loads(file.read_text())
        if record["quick"]:
            raise SystemExit(f"{file} is of a --quick run, which shows that a study runs and nothing else")
        path = folder / f"{record['study']}.md"
        path.write_text(page_of(record, kept(path)))
        print(f"{path}: {len(record['jobs'])} runs, {len(record['errors'])} errors, {len(record['not_run'])} not run")
    there = [name for name in PAGES if (folder / f"{name}.md").exists()]
    lines = [[f"[{PAGES[name].title}]({name}.md)", PAGES[name].what, standing(PAGES[name])] for name in there]
    (folder / "README.md").write_text(INDEX + markdown(["study", "question", "verdicts"], lines) + "\n")


def standing(page: Page) -> str:
    """Which verdicts of a page do not stand, for the index."""
    gone = [claim.text for claim in page.claims if claim.withdrawn]
    if not gone:
        return "stand as printed"
    return f"{WITHDRAWN}: {'all' if len(gone) == len(page.claims) else '; '.join(gone)}"


INDEX = """# Evidence on real data

Small studies on public research data, each one run on one GPU, with several seeds. Numbers are percent on test data,
means over seeds with 95 % intervals of Student's t; differences are paired by seed. Everything that is chosen (a
temperature, a learning rate, a point of training, the strength of a probe) is chosen on validation data. The sets are
reduced copies and training is short, so rows are to be compared with each other, not with published tables. The data
do not come with the package. Intervals are not corrected for how many claims are looked at; few seeds make them wide.

An audit of these pages found that many verdicts do not stand: they rest on two seeds, on a choice at the edge of its
grid, on a control that was not fair, on a probe that had not converged, or on a set-up that learned nothing. Each is
marked *withdrawn, being measured again* with its reason. The measured numbers stay; they decide nothing.

"""


def kept(path: Path) -> str:
    """What a person wrote at the end of the page before."""
    text = path.read_text() if path.exists() else ""
    return text.split(SAYS, 1)[1].strip() if SAYS in text else ""


def page_of(record: dict[str, Any], says: str) -> str:
    """The whole page."""
    page, rows = PAGES[record["study"]], rows_of(record)
    told = f"**Protocol.** {page.protocol}"
    parts = [f"# {page.title}", fill(page.what, 118), *notice(page), fill(told, 118, break_on_hyphens=False)]
    parts.append(ran(record))
    for prefix in page.tables:
        own = {name.removeprefix(prefix): by for name, by in rows.items() if name.startswith(prefix)}
        title = f": {prefix.strip().replace('_', ' ')}" if prefix else ""
        parts += [f"## Results{title}", levels(own, page.words, page.metrics, page.scales)]
        some = [m for m in page.metrics if page.scales.get(m, 100) == 100]
        parts += ["Differences, paired by seed:", differences(own, page.words, page.base, some)]
        parts += [f"## Claims{title}", claims(own, page)] if page.claims else []
    parts += [text for text in (choices(record), people(record), weighed(record), pulled(record)) if text]
    parts += [SAYS, says or "To be written by whoever has read the table."]
    return "\n\n".join(parts) + "\n"


def notice(page: Page) -> list[str]:
    """What a reader must know first: which verdicts of the page do not stand."""
    gone = [claim for claim in page.claims if claim.withdrawn]
    if not gone:
        return []
    count = "all" if len(gone) == len(page.claims) else f"{len(gone)} of {len(page.claims)}"
    text = f"**Verdicts of this page that are {WITHDRAWN}: {count}.** The numbers are what was measured; the table of"
    return [fill(f"{text} claims says why they do not decide.", 118, break_on_hyphens=False)]


def ran(record: dict[str, Any]) -> str:
    """How it was run."""
    epochs = sorted({job["epochs"] for job in record["jobs"] if "epochs" in job})
    span = f"{epochs[0]} to {epochs[-1]}" if len(epochs) > 1 else f"{epochs[0]}" if epochs else "?"
    where = f"{record['device']}, torch {record['torch']}, {record['workers']} runs at a time"
    lost = [f"{len(record[k])} {word}" for k, word in (("not_run", "not run"), ("errors", "failed")) if record[k]]
    gone = f" Of the planned runs {' and '.join(lost)}." if lost else ""
    text = (
        f"**Run.** Seeds {', '.join(map(str, record['seeds']))}; {record.get('steps', '?')} steps (epochs: {span}); "
        f"{where}; {1e3 * record.get('seconds_per_step', np.nan):.1f} ms a step of one run, "
        f"{record['seconds']:.0f} s in all.{gone}"
    )
    return f"{fill(text, 118, break_on_hyphens=False)}\n\n```bash\n{shell(record['command'])}\n```"


def shell(command: str) -> str:
    """The command without the folders of the machine that it ran on."""
    words = command.split()
    for flag, name in (("--data", "DATA"), ("--out", "OUT.json"), ("--cache", "CACHE")):
        if flag in words:
            words[words.index(flag) + 1] = name
    return " ".join(words)


def claims(rows: Rows, page: Page) -> str:
    """What the papers say, and what the intervals say of it."""
    lines = []
    for claim in page.claims:
        if claim.row in rows and claim.base in rows:
            x = difference(rows, claim.row, claim.base, claim.metric)
            lines.append([claim.text, shown(x, signed=True), verdict(x, claim.sign, claim.withdrawn)])
    return markdown(["claim", "difference", "here"], lines)


def choices(record: dict[str, Any]) -> str:
    """What was tried and what validation chose."""
    tried = [job for job in record["jobs"] if job["kind"] == "try"]
    if not tried:
        return ""
    lines = []
    for job in sorted(tried, key=lambda j: (list(record["candidates"]).index(j["method"]), j["candidate"])):
        options = record["candidates"][job["method"]][job["candidate"]]
        chosen = "chosen" if record["chosen"].get(job["method"]) == job["candidate"] else ""
        seen = job.get("validation") or {"R@1": job["score"]}
        values = ", ".join(f"{name} {100 * v:.2f}" for name, v in seen.items())
        lines.append([job["method"], ", ".join(f"{k} {v:g}" for k, v in options.items()), values, chosen])
    return "## Candidates on validation data, first seed\n\n" + markdown(["method", "options", "validation", ""], lines)


def people(record: dict[str, Any]) -> str:
    """Intervals over resampled people, first seed."""
    judged = [job for job in record["jobs"] if "people" in job]
    if not judged:
        return ""
    names, lines = list(judged[0]["people"]), []
    for job in judged:
        row, inside = job["rows"][job["method"]], job["people"]
        cells = [f"{100 * row[n]:.2f} [{100 * inside[n]['low']:.2f}, {100 * inside[n]['high']:.2f}]" for n in names]
        lines.append([job["method"], *cells])
        if "against supcon" in job:
            gaps = [job["against supcon"][n] for n in names]
            cells = [f"{100 * g['difference']:+.2f} [{100 * g['low']:+.2f}, {100 * g['high']:+.2f}]" for g in gaps]
            lines.append([f"{job['method']} − supcon", *cells])
    return "## Other people, first seed: 95 % intervals over resampled people\n\n" + markdown(["", *names], lines)


def weighed(record: dict[str, Any]) -> str:
    """What relative difficulty did: its weights at the end of training, and by groups where there are any."""
    lines = []
    for job in record["jobs"]:
        last = (job.get("trace") or [{}])[-1]
        if "weight_mean" not in last:
            continue
        cells = [f"{last[k]:.3f}" if k in last else "" for k in ("weight_mean", "weight_std", "clamp_fraction")]
        groups = job.get("weights", {})
        cells += [f"{groups[k]:.3f}" if k in groups else "" for k in ("weight_same_group", "weight_other_group")]
        lines.append([f"{job['method']}, seed {job['seed']}", *cells])
    head = ["", "mean w", "std of w", "clamped", "w, same group and other class", "w, other group and other class"]
    return "## Weights of negatives\n\n" + markdown(head, lines) if lines else ""


def pulled(record: dict[str, Any]) -> str:
    """How hard synthetic negatives became: λ and the weight of real tuples at four points of the first seed's runs."""
    lines = []
    for job in record["jobs"]:
        trace = [t for t in job.get("trace", []) if "lambda" in t]
        if trace and job["seed"] == record["seeds"][0] and job["method"].startswith("hdml"):
            chosen = record["chosen"].get(job["method"], 0) == job["candidate"]
            cells = [f"λ {t['lambda']:.2f}, real {t['weight_real']:.2f}" for t in trace]
            quality = trace[-1].get("reconstruction")
            if chosen:
                lines.append([job["method"], *cells, "" if quality is None else f"{quality:.2f}"])
    if not lines:
        return ""
    head = ["", *(f"{k} of 4" for k in range(1, len(lines[0]) - 1)), "reconstruction error (mean feature: 1)"]
    return "## Levels of the synthesis\n\n" + markdown(head, lines)
