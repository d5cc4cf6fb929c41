"""One of several processes that write to one gallery on a server: python writer.py URL WORKER CHANGES."""

import json
import random
import sys

from storage_fixtures import units

from mettle.errors import UnknownIdentity
from mettle.gallery.storage.postgres import PostgresStorage


def main(url: str, worker: int, changes: int) -> None:
    storage, rng = PostgresStorage.open(url, timeout=60), random.Random(worker)
    for turn in range(changes):
        name, seed = f"p{rng.randrange(5)}", 10_000 * worker + turn
        verb = rng.choice(["enrol", "enrol", "replace", "delete"])
        print(json.dumps({"try": [verb, name, seed]}), flush=True)
        try:
            if verb == "delete":
                done = storage.delete(name)
            else:
                done = storage.enrol(name, units(seed, 2), replace=verb == "replace")
        except UnknownIdentity:
            continue
        print(json.dumps({"done": [done.sequence, list(done.numbers), verb, name, seed]}), flush=True)
    storage.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
