"""The same contract as `reference`, in memory O(n · tile): nothing quadratic is ever held.

Forward, tiles are visited once and added to their rows. Backward, each tile is computed again and the gradients of
its rows are propagated to it. When a batch is compared with itself, only the tiles on and above the diagonal are
computed: a tile serves the rows at both of its ends, and where its terms need nothing but the tile itself they are
evaluated once for both. Positive pairs are few, so a pass over nothing else takes them as a list.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.accumulators import Accumulator, Collect, Ends, accumulator
from mettle.pairs.interface import Acc, Tile
from mettle.pairs.problem import Job, Span, Step
from mettle.pairs.similarity import Sides

MOST = 1 << 16  # pairs handled at once
BLOCK = 128  # rows whose positives are compared by one matrix product
FEW = 64  # positives per anchor, on average, up to which a list is shorter work than tiles


@dataclass(frozen=True)
class Block:
    """Pairs ``pairs`` of a list lie in the block ``rows`` x ``columns`` of the matrix, at (``i``, ``j``) of it."""

    pairs: slice
    rows: slice
    columns: slice
    i: Tensor
    j: Tensor


@dataclass(frozen=True)
class Pairs:
    """Positions of anchors and references, in the order of the job, and the blocks of the matrix they lie in.

    Rows are sorted by label, so the positives of neighbouring rows are neighbouring columns: their products come from
    small blocks near the diagonal, which is several times faster than gathering two rows for every pair.
    """

    i: Tensor
    j: Tensor
    blocks: tuple[Block, ...]

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """(p, 1) dot products of row i of ``a`` with row j of ``b``."""
        parts = [(a[block.rows] @ b[block.columns].T)[block.i, block.j] for block in self.blocks]
        return torch.cat(parts).unsqueeze(1)

    def pull(self, g: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        """Add the gradient of `products`, given that of its values, (p, 1)."""
        for block in self.blocks:
            rows, columns = a[block.rows], b[block.columns]
            spread = g.new_zeros(len(rows), len(columns))
            spread[block.i, block.j] = g[block.pairs, 0]
            da[block.rows] += spread @ columns
            db[block.columns] += spread.T @ rows


def positive_pairs(job: Job) -> list[Pairs] | None:
    """Every positive pair of a job whose rows are sorted by label, in lists of bounded length.

    None where classes are so large that a list would be longer work than the tiles, and take more memory.
    """
    start = torch.searchsorted(job.right.labels, job.left.labels)
    stop = torch.searchsorted(job.right.labels, job.left.labels, right=True)
    counts = stop - start
    ends = counts.cumsum(0)
    found: list[Pairs] = []
    row, n, total, passed = 0, len(counts), int(ends[-1]), 0
    if total > FEW * n:
        return None
    while passed < total:
        last = int(torch.searchsorted(ends, min(passed + MOST, total)))
        last = max(last + (int(ends[min(last, n - 1)]) <= passed + MOST), row + 1)
        i = torch.repeat_interleave(torch.arange(row, last, device=ends.device), counts[row:last])
        first = torch.cat([ends.new_zeros(1), counts[row:last].cumsum(0)[:-1]])
        j = start[i] + torch.arange(len(i), device=i.device) - first[i - row]
        keep = i != j if job.ref is None else _other_ids(job, i, j)
        i, j = (i, j) if keep is None else (i[keep], j[keep])
        if len(i):
            found.append(Pairs(i, j, _blocks(i, j, start, stop, row, last)))
        row, passed = last, int(ends[last - 1])
    return found


def _blocks(i: Tensor, j: Tensor, start: Tensor, stop: Tensor, row: int, last: int) -> tuple[Block, ...]:
    """Cut the list where its anchors ``row`` to ``last`` - 1 cross a multiple of `BLOCK`."""
    firsts = list(range(row, last, BLOCK))
    lasts = [*firsts[1:], last]
    marks = torch.tensor([*firsts, last], device=i.device)
    cuts = torch.searchsorted(i, marks).tolist()
    low = start[marks[:-1]].tolist()
    high = stop[marks[1:] - 1].tolist()
    return tuple(
        Block(slice(p, q), slice(a, b), slice(c, d), i[p:q] - a, j[p:q] - c)
        for p, q, a, b, c, d in zip(cuts[:-1], cuts[1:], firsts, lasts, low, high, strict=True)
        if p < q
    )


def _other_ids(job: Job, i: Tensor, j: Tensor) -> Tensor | None:
    if job.left.ids is None or job.right.ids is None:
        return None
    return job.left.ids[i] != job.right.ids[j]


def listed(job: Job, pairs: Pairs) -> Tile:
    """A list of pairs as a tile of one column."""
    ref = job.z if job.ref is None else job.ref
    s = _similarity(pairs, job.z, ref, job.measure)
    biased = None if job.biased is None else _similarity(pairs, *job.biased, job.measure)
    pos = torch.ones_like(s, dtype=torch.bool)
    a, b = job.left.at[pairs.i, None], job.right.at[pairs.j, None]
    sides = Sides(job.z, ref, pairs.i, pairs.j, job.measure)
    return Tile(s, pos, False, a, b, job.loss.temperature, biased, sides)


def _similarity(pairs: Pairs, a: Tensor, b: Tensor, measure: str) -> Tensor:
    if measure == "squared":  # by differences: a small distance is not the difference of two large numbers
        return -(a[pairs.i] - b[pairs.j]).square().sum(1, keepdim=True)
    return pairs.products(a, b)


SIZE = 512  # 512 x 512 float32 is 1 MB: a tile and its temporaries stay in a core's cache
SMALL = 1024  # rows up to which half of that wastes less on the diagonal


def rows(job: Job, size: int | None = None) -> dict[str, Tensor]:
    """Everything that the rows accumulate, (n,) or (n, m) each, with gradient to ``job.z`` and ``job.ref``."""
    walk = _Walk(job, size or (SIZE // 2 if len(job.z) <= SMALL else SIZE))
    values = _Tiled.apply(walk, job.z, job.ref)
    return dict(zip(walk.names(), values, strict=True))


class _Tiled(torch.autograd.Function):
    """Row accumulators as a function of the embeddings; gradients by recomputing each tile."""

    @staticmethod
    def forward(ctx, walk: "_Walk", z: Tensor, ref: Tensor | None):  # type: ignore[override]
        for step in walk.steps:
            walk.accumulate(step)
        ctx.walk = walk
        return tuple(value for values in walk.values for value in values.values())

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # recomputed tiles have no graph: a second derivative would be silently wrong
            raise InputError("the tiled engine has first derivatives only: do not pass create_graph=True")
        dz, dref = ctx.walk.pull(grads)
        return None, dz, dref


class _Walk:
    """The tiles of one job in order, and what its rows have accumulated so far."""

    def __init__(self, job: Job, size: int):
        self.steps = job.steps()
        self.left = job.left.spans(size)
        self.right = self.left if job.ref is None else job.right.spans(size)
        self.job = replace(job, z=job.z.detach(), ref=None if job.ref is None else job.ref.detach())
        self.z = self.job.z
        self.ref = self.z if self.job.ref is None else self.job.ref
        found = positive_pairs(self.job) if any(step.as_list for step in self.steps) else []
        if found is None:
            self.steps = [replace(step, as_list=False) for step in self.steps]
        self.pairs = found or []
        self.watched = torch.is_grad_enabled()  # before the autograd function, which switches it off
        self.held: dict[int, Tile] = {}
        self.tables: list[dict[str, Accumulator]] = []
        self.values: list[dict[str, Tensor]] = []

    def names(self) -> list[str]:
        """Of all accumulators, in order."""
        return [name for table in self.tables for name in table]

    def tiles(self, step: Step) -> Iterator[tuple[Span, Span, Tile]]:
        """Every tile that the step needs; above the diagonal only when both sides are the same rows."""
        for k, i in enumerate(self.left):
            for j in self.right[k:] if self.job.ref is None else self.right:
                if not (step.positives_only and (i.high < j.low or j.high < i.low)):
                    yield i, j, self.job.tile(i, j)

    def ends(self, step: Step, i: Span, j: Span, tile: Tile) -> Iterator[tuple[Tile, Span, Span, Ends]]:
        """A tile once for both of its ends where its terms allow that, else once per end."""
        mirrored = self.job.ref is None and i.start != j.start
        if not mirrored or step.reads == "nothing":
            yield tile, i, j, (i.rows, j.rows if mirrored else None)
        else:
            yield tile, i, j, (i.rows, None)
            yield transposed(tile), j, i, (j.rows, None)

    def known(self, step: Step, before: int, i: slice, j: slice) -> dict[str, Tensor]:
        """What earlier steps accumulated for these rows, as columns, and for the other end where that is read."""
        if step.reads == "nothing":
            return {}
        values = {name: value for table in self.values[:before] for name, value in table.items()}
        found = {name: value[i].unsqueeze(1) for name, value in values.items()}
        if step.reads == "both":
            found |= {f"{name}ᵀ": value[j].unsqueeze(0) for name, value in values.items()}
        return found

    def blank(self, step: Step) -> dict[str, Acc]:
        """The terms of a step on a tile of one pair, which tells their names, and whether all will be differentiated.

        The way back follows similarities only. A blank tile has no gradient, so a term of it that wants one depends on
        something else: that would get a part of its gradient, or none, without a word.
        """
        one = slice(0, 1)
        tile, known = self.job.blank(), self.known(step, len(self.tables), one, one)
        with torch.set_grad_enabled(self.watched):
            found = step.terms(tile, known)
            live = self.watched and self.job.difficulty is not None and not self.job.difficulty.detach
            w = step.weigh(tile, known) if live else None
        wanting = [name for name, acc in found.items() if isinstance(acc.x, Tensor) and acc.x.requires_grad]
        if w is not None and w.requires_grad:
            wanting.append("the weights")
        if wanting and not step.constant:
            raise InputError(
                f"{wanting[0]} of {type(self.job.loss).__name__} want a gradient for something other than the "
                "embeddings (a learnable parameter inside?), which tiles do not give: pass engine='dense', or use the "
                "parameter in finish, outside the loss, or as a number"
            )
        return found

    def accumulate(self, step: Step) -> None:
        """One forward pass."""
        k, blank = len(self.tables), self.blank(step)
        table = {name: accumulator(acc, len(self.z), self.z, self.job.most_positives) for name, acc in blank.items()}
        with torch.no_grad():
            if step.as_list:
                for number, pairs in enumerate(self.pairs):
                    tile, known = self.listed(number), self.gathered(step, k, pairs)
                    w = step.weigh(tile, known)
                    for name, acc in step.terms(tile, known).items():
                        table[name].fold_list(acc, w, pairs.i)
            for i, j, whole in () if step.as_list else self.tiles(step):
                for tile, a, b, ends in self.ends(step, i, j, whole):
                    known = self.known(step, k, a.rows, b.rows)
                    w = step.weigh(tile, known)
                    for name, acc in step.terms(tile, known).items():
                        if acc.mask is not False:
                            table[name].fold(acc, w, ends, (tile.s.shape[0], tile.s.shape[1]))
        self.tables.append(table)
        self.values.append({name: acc.value() for name, acc in table.items()})

    def pull(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """The backward pass: last step first, because it may send gradient to the rows of earlier ones."""
        values = [value for table in self.values for value in table.values()]
        g = {
            name: torch.zeros_like(value) if grad is None else grad.to(value.dtype).clone()
            for name, value, grad in zip(self.names(), values, grads, strict=True)
        }
        dz = torch.zeros_like(self.z)
        dref = dz if self.job.ref is None else torch.zeros_like(self.ref)
        for k in reversed(range(len(self.steps))):
            step, table = self.steps[k], self.tables[k]
            if step.constant:
                continue
            if step.as_list:
                for number in range(len(self.pairs)):
                    self._pull_list(k, number, g, dz, dref)
                continue
            for acc in table.values():
                if isinstance(acc, Collect):
                    acc.rewind()
            for i, j, whole in self.tiles(step):
                gs = None
                for tile, a, b, ends in self.ends(step, i, j, whole):
                    part = self._pull_tile(k, tile, a, b, ends, g)
                    if part is not None:
                        part = part if tile is whole else part.T
                        gs = part if gs is None else gs + part
                if gs is not None:
                    dz[i.rows] += self._through(gs, i, j, dref)
        return dz, None if self.job.ref is None else dref

    def _pull_tile(self, k: int, tile: Tile, a: Span, b: Span, ends: Ends, g: dict[str, Tensor]) -> Tensor | None:
        """Gradient of the tile's similarities, if any; gradient of earlier rows is added to ``g``."""
        gs, rows = self._differentiate(k, tile, self.known(self.steps[k], k, a.rows, b.rows), g, ends)
        for name, grad in rows.items():
            if name.endswith("ᵀ"):
                g[name[:-1]][b.rows] += grad.squeeze(0)
            else:
                g[name][a.rows] += grad.squeeze(1)
        return gs

    def _differentiate(
        self, k: int, tile: Tile, found: dict[str, Tensor], g: dict[str, Tensor], ends: Ends | Tensor
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Evaluate a step on a tile again and pull gradients back: onto its similarities, and onto earlier rows."""
        step = self.steps[k]
        with torch.enable_grad():
            s = tile.s.detach().requires_grad_()
            known = {n: v.detach().requires_grad_(v.is_floating_point()) for n, v in found.items()}
            tile = replace(tile, s=s)
            w = step.weigh(tile, known)
            accs = step.terms(tile, known)
        outputs, gradients = _pulled(accs, w, self.tables[k], g, ends)
        if not outputs:
            return None, {}
        gs, *rows = torch.autograd.grad(outputs, [s, *known.values()], gradients, allow_unused=True)
        return gs, {name: grad for name, grad in zip(known, rows, strict=True) if grad is not None}

    def listed(self, number: int) -> Tile:
        """A list of positive pairs as a tile, remembered for the way back."""
        if number not in self.held:
            self.held[number] = listed(self.job, self.pairs[number])
        return self.held[number]

    def gathered(self, step: Step, before: int, pairs: Pairs) -> dict[str, Tensor]:
        """What earlier steps accumulated, for each pair of a list."""
        if step.reads == "nothing":
            return {}
        values = {name: value for table in self.values[:before] for name, value in table.items()}
        found = {name: value[pairs.i].unsqueeze(1) for name, value in values.items()}
        if step.reads == "both":
            found |= {f"{name}ᵀ": value[pairs.j].unsqueeze(1) for name, value in values.items()}
        return found

    def _pull_list(self, k: int, number: int, g: dict[str, Tensor], dz: Tensor, dref: Tensor) -> None:
        """As `_pull_tile`, for a list of pairs, and on to the embeddings."""
        pairs = self.pairs[number]
        found = self.gathered(self.steps[k], k, pairs)
        gs, rows = self._differentiate(k, self.listed(number), found, g, pairs.i)
        for name, grad in rows.items():
            own, at = (name[:-1], pairs.j) if name.endswith("ᵀ") else (name, pairs.i)
            g[own].index_add_(0, at, grad.squeeze(1))
        if gs is not None and self.job.measure == "squared":
            apart = 2 * gs * (self.ref[pairs.j] - self.z[pairs.i])
            dz.index_add_(0, pairs.i, apart)
            dref.index_add_(0, pairs.j, -apart)
        elif gs is not None:
            pairs.pull(gs, self.z, self.ref, dz, dref)

    def _through(self, gs: Tensor, i: Span, j: Span, dref: Tensor) -> Tensor:
        """From similarities to embeddings; adds the references' part and returns the anchors'."""
        a, b = self.z[i.rows], self.ref[j.rows]
        if self.job.measure == "squared":
            dref[j.rows] += 2 * (gs.T @ a - gs.sum(0)[:, None] * b)
            return 2 * (gs @ b - gs.sum(1)[:, None] * a)
        dref[j.rows] += gs.T @ a
        return gs @ b


def _pulled(
    accs: dict[str, Acc], w: Tensor | None, table: dict[str, Accumulator], g: dict[str, Tensor], ends: Ends | Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that depend on the tile, with their gradients, ready for one call of autograd."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    for name, acc in accs.items():
        if acc.mask is False:
            continue
        moves = isinstance(acc.x, Tensor) and acc.x.requires_grad
        live = w is not None and w.requires_grad and acc.weigh == "full"
        if not (moves or live):
            continue
        plain = replace(acc, x=acc.x.detach()) if isinstance(acc.x, Tensor) else acc
        fixed = None if w is None else w.detach()
        if isinstance(ends, Tensor):
            gx, gw = table[name].pull_list(plain, fixed, g[name], ends, live)
        else:
            gx, gw = table[name].pull(plain, fixed, g[name], ends, live)
        if moves:
            assert isinstance(acc.x, Tensor)
            outputs.append(acc.x)
            gradients.append(gx.expand_as(acc.x))
        if live:
            assert w is not None
            assert gw is not None
            outputs.append(w)
            gradients.append((gw.sum(2) if gw.ndim == 3 else gw).expand_as(w))
    return outputs, gradients


def transposed(tile: Tile) -> Tile:
    """The same pairs seen from the other end."""

    def flip(m):
        return m.T if isinstance(m, Tensor) else m

    flipped = {name: flip(getattr(tile, name)) for name in ("s", "pos", "neg", "biased")}
    sides = None if tile.sides is None else tile.sides.turned()
    return replace(tile, i=tile.j.T, j=tile.i.T, sides=sides, **flipped)
