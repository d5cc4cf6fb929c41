"""`mettle reproduce`: what is said of the methods, tried here."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from mettle.cli.claims import CLAIMS, WITHDRAWN, Claim
from mettle.cli.shell import app, cache
from mettle.errors import InputError

LEAST, MOST = 2, 20


@app.command()
def reproduce(
    claims: Annotated[list[str] | None, typer.Argument(help="Which to try; `all` for all. None: list them.")] = None,
    seeds: Annotated[int, typer.Option(help="How often what is drawn by chance is drawn.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines.")] = False,
) -> None:
    """Try claims about the methods on this machine, each with its control. A claim that fails is a result, no error."""
    if not LEAST <= seeds <= MOST:
        raise InputError(f"--seeds must be between {LEAST} and {MOST}, got {seeds}")
    if not claims:
        if as_json:
            print(json.dumps({name: _describe_claim(claim) for name, claim in CLAIMS.items()}, indent=1))
            return
        for name, claim in CLAIMS.items():
            print(f"  {name:<10}  {claim.says}{f' ({WITHDRAWN})' if claim.withdrawn else ''}")
        print("Try some with `mettle reproduce NAME ...`. Claims that need real data: docs/results.")
        return
    unknown = [name for name in claims if name not in (*CLAIMS, "all")]
    if unknown:
        raise InputError(f"no claim {unknown[0]!r}: one of {', '.join(CLAIMS)}, or all")
    found = {}
    for name in CLAIMS if "all" in claims else dict.fromkeys(claims):
        outcome = CLAIMS[name].judge(seeds, cache())
        found[name] = {**_describe_claim(CLAIMS[name]), **asdict(outcome)}
        if not as_json:
            print(f"{name}: {CLAIMS[name].says}", *(f"  {line}" for line in outcome.lines), sep="\n")
            print(f"  {outcome.verdict}", flush=True)
    if as_json:
        print(json.dumps(found, indent=1))


def _describe_claim(claim: Claim) -> dict[str, str]:
    """A claim, with the reason where its verdict is withdrawn."""
    return {"says": claim.says} | ({"withdrawn": claim.withdrawn} if claim.withdrawn else {})
