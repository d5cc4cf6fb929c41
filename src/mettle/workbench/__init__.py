"""The workbench: one page on which a run can be looked at, played with and compared with another.

Run ─ Bench (lazy) ─┬─ scene   test embeddings, columns, difficulty
                    ├─ place   where each sample lies on the map
                    ├─ tally   false accepts and false rejects at every position of the slider
                    ├─ search  hardest pairs, pairs at the threshold, suspected labels, by filter
                    └─ versus  differences from another run, with intervals
routes(runs, gallery) ── GET /workbench: page, scripts, arrays, pictures; POST /workbench/api/identify, verify
"""

from mettle.workbench.routes import routes

__all__ = ["routes"]
