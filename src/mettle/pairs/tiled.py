"""The same contract as `dense`, in memory O(n · tile): nothing quadratic is ever held.

Forward, tiles are visited once and folded into their rows. Backward, each tile is computed again and the gradients of
its rows are pulled back onto it. When a batch is compared with itself, only the tiles on and above the diagonal are
computed: a tile serves the rows at both of its ends, and where its terms need nothing but the tile itself they are
evaluated once for both.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mettle.pairs.accumulate import accumulator
from mettle.pairs.contract import Acc, Tile
from mettle.pairs.job import Job, Step
from mettle.pairs.relation import Span

SIZE = 512  # 512 x 512 float32 is 1 MB: a tile and its temporaries stay in a core's cache


def rows(job: Job, size: int = SIZE) -> dict[str, Tensor]:
    """Everything that the rows accumulate, (n,) each, with gradient to ``job.z`` and ``job.ref``."""
    names = _names(job)
    values = _Tiled.apply(job, size, job.z, job.ref)
    return dict(zip(names, values, strict=True))


def _names(job: Job) -> list[str]:
    blank, known, names = job.blank(), _Blank(job.z), []
    for step in job.steps():
        names += list(step.terms(blank, known))
    return names


class _Blank(dict):
    """Rows of a tile that holds nothing, whatever they are called."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.like = like

    def __missing__(self, name: str) -> Tensor:
        return self.like.new_zeros(1, 1)


class _Tiled(torch.autograd.Function):
    """Row accumulators as a function of the embeddings; gradients by recomputing each tile."""

    @staticmethod
    def forward(ctx, job: Job, size: int, z: Tensor, ref: Tensor | None):  # type: ignore[override]
        walk = _Walk(job, size)
        for step in walk.steps:
            walk.accumulate(step)
        ctx.walk = walk
        values = tuple(acc.value() for table in walk.tables for acc in table.values())
        return values

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        dz, dref = ctx.walk.pull(grads)
        return None, None, dz, dref


class _Walk:
    """The tiles of one job in order, and what its rows have accumulated so far."""

    def __init__(self, job: Job, size: int):
        self.job, self.steps = job, job.steps()
        self.left = job.left.spans(size)
        self.right = self.left if job.ref is None else job.right.spans(size)
        self.z = job.z.detach()
        self.ref = self.z if job.ref is None else job.ref.detach()
        self.tables: list[dict] = []

    def tiles(self, step: Step) -> Iterator[tuple[Span, Span, Tile]]:
        """Every tile that the step needs; above the diagonal only when both sides are the same rows."""
        job = Job(**{**vars(self.job), "z": self.z, "ref": None if self.job.ref is None else self.ref})
        for k, i in enumerate(self.left):
            for j in self.right[k:] if self.job.ref is None else self.right:
                if step.positives_only and (i.high < j.low or j.high < i.low):
                    continue
                tile = job.tile(i, j)
                if not (step.positives_only and tile.pos is False):
                    yield i, j, tile

    def known(self, rows: slice) -> dict[str, Tensor]:
        """What earlier steps accumulated for these rows, as columns."""
        return {name: acc.value()[rows, None] for table in self.tables for name, acc in table.items()}

    def ends(self, step: Step, i: Span, j: Span, tile: Tile) -> Iterator[tuple[Tile, slice, slice | None]]:
        """A tile once for both of its ends where its terms allow that, else once per end."""
        mirrored = self.job.ref is None and i.start != j.start
        if not mirrored or not step.reads:
            yield tile, i.rows, j.rows if mirrored else None
        else:
            yield tile, i.rows, None
            yield transposed(tile), j.rows, None

    def accumulate(self, step: Step) -> None:
        """One forward pass."""
        n, blank, zeros = len(self.left and self.job.left), self.job.blank(), _Blank(self.z)
        table = {name: accumulator(acc, n, self.z) for name, acc in step.terms(blank, zeros).items()}
        with torch.no_grad():
            for i, j, whole in self.tiles(step):
                for tile, rows, columns in self.ends(step, i, j, whole):
                    known = self.known(rows) if step.reads else {}
                    w = step.weigh(tile, known)
                    for name, acc in step.terms(tile, known).items():
                        if acc.mask is not False:
                            table[name].fold(acc, w, (rows, columns), tuple(tile.s.shape))
        self.tables.append(table)

    def pull(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
        """The backward pass: last step first, because it may send gradient to the rows of earlier ones."""
        names = [name for table in self.tables for name in table]
        g = {
            name: self.z.new_zeros(len(self.z)) if grad is None else grad.to(self.z.dtype).clone()
            for name, grad in zip(names, grads, strict=True)
        }
        dz = torch.zeros_like(self.z)
        dref = dz if self.job.ref is None else torch.zeros_like(self.ref)
        for k in reversed(range(len(self.steps))):
            step, table = self.steps[k], self.tables[k]
            if step.constant:
                continue
            earlier = self.tables[:k]
            for i, j, whole in self.tiles(step):
                gs = torch.zeros_like(whole.s)
                for tile, rows, columns in self.ends(step, i, j, whole):
                    part = self._pull_tile(step, table, earlier, tile, rows, columns, g)
                    gs += part if tile is whole else part.T
                dz[i.rows] += self._through(gs, i, j, dref)
        return dz, None if self.job.ref is None else dref

    def _pull_tile(self, step, table, earlier, tile, rows, columns, g) -> Tensor:
        """Gradient of the tile's similarities; gradient of earlier rows is added to ``g``."""
        names = [name for rowset in earlier for name in rowset] if step.reads else []
        with torch.enable_grad():
            s = tile.s.detach().requires_grad_()
            known = {
                name: acc.value()[rows, None].detach().requires_grad_()
                for rowset in (earlier if step.reads else [])
                for name, acc in rowset.items()
            }
            tile = Tile(s, tile.pos, tile.neg, tile.temperature, tile.biased)
            w = step.weigh(tile, known)
            accs = step.terms(tile, known)
        outputs, gradients = _pulled(accs, w, table, g, (rows, columns))
        if not outputs:
            return torch.zeros_like(s)
        found = torch.autograd.grad(
            outputs, [s, *known.values()], gradients, allow_unused=True, materialize_grads=False
        )
        for name, grad in zip(names, found[1:], strict=True):
            if grad is not None:
                g[name][rows] += grad.squeeze(1)
        return torch.zeros_like(s) if found[0] is None else found[0]

    def _through(self, gs: Tensor, i: Span, j: Span, dref: Tensor) -> Tensor:
        """From similarities to embeddings; adds the references' part and returns the anchors'."""
        a, b = self.z[i.rows], self.ref[j.rows]
        if self.job.measure == "squared":
            dref[j.rows] += 2 * (gs.T @ a - gs.sum(0)[:, None] * b)
            return 2 * (gs @ b - gs.sum(1)[:, None] * a)
        dref[j.rows] += gs.T @ a
        return gs @ b


def _pulled(accs: dict[str, Acc], w: Tensor | None, table: dict, g: dict[str, Tensor], ends) -> tuple[list, list]:
    """Tensors that depend on the tile, with their gradients, ready for one call of autograd."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    live = w is not None and w.requires_grad
    for name, acc in accs.items():
        if acc.mask is False:
            continue
        moves = isinstance(acc.x, Tensor) and acc.x.requires_grad
        if not (moves or (live and acc.weigh == "full")):
            continue
        plain = Acc(acc.kind, acc.x.detach() if isinstance(acc.x, Tensor) else acc.x, acc.mask, acc.weigh)
        gx, gw = table[name].pull(plain, None if w is None else w.detach(), g[name], ends)
        if moves:
            outputs.append(acc.x)  # type: ignore[arg-type]
            gradients.append(gx)
        if live and acc.weigh == "full":
            outputs.append(w)  # type: ignore[arg-type]
            gradients.append(gw)
    return outputs, gradients


def transposed(tile: Tile) -> Tile:
    """The same pairs seen from the other end."""

    def flip(m):
        return m.T if isinstance(m, Tensor) else m

    return Tile(tile.s.T, flip(tile.pos), flip(tile.neg), tile.temperature, flip(tile.biased))
