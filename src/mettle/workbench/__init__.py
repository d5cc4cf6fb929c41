"""The workbench: one page on which a run can be looked at, played with and compared with another.

LazyRun ─┬─ run_data          test embeddings, columns, difficulty
         ├─ projection        where each sample lies on the map
         ├─ threshold_counts  false accepts and false rejects at every position of the slider
         ├─ pair_search       hardest pairs, pairs at the threshold, suspected labels, by filter
         └─ run_comparison    differences from another run, with intervals
routes(runs) ── GET /workbench: page, scripts, arrays, pictures; the page asks the service that mounts it under /v1
"""

from mettle.workbench.routes import routes

__all__ = ["routes"]
