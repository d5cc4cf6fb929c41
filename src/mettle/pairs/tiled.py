"""The same contract as `reference`, in memory O(n · tile): nothing quadratic is ever held.

Forward, tiles are visited once and added to their rows. Backward, each tile is computed again and the gradients of
its rows are propagated to it. When a batch is compared with itself, only the tiles on and above the diagonal are
computed: a tile serves the rows at both of its ends, and where its reductions need nothing but the tile itself they
are evaluated once for both. Positive pairs are few, so a pass over nothing else takes them as a list.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import reference
from mettle.pairs.accumulators import Accumulator, Ends, Gather, PairEnd, TileEnd, make_accumulator
from mettle.pairs.interface import Reduction, Tile, temperature_of
from mettle.pairs.problem import PairProblem, ResolvedPass, RowBlock
from mettle.pairs.similarity import TileOperands, differentiable_gradients, safe_sqrt, warn_dense_recomputation

TILE_ROWS = 512  # 512 x 512 float32 is 1 MB: a tile and its temporaries stay in a core's cache
FEW_ROWS = 1024  # rows up to which tiles of half that size waste less on the diagonal
MAX_LISTED_PAIRS = 1 << 16  # pairs handled at once
PAIR_BLOCK_ROWS = 128  # rows whose positives are compared by one matrix product
MAX_MEAN_POSITIVES = 64  # positives per anchor, on average, up to which a list is shorter work than tiles


@dataclass(frozen=True)
class PairBlock:
    """Pairs ``pairs`` of a list lie in the block ``rows`` x ``columns`` of the matrix, at (``i``, ``j``) of it."""

    pairs: slice
    rows: slice
    columns: slice
    i: Tensor
    j: Tensor


@dataclass(frozen=True)
class PairList:
    """Positions of anchors and references, in the order of the problem, and the blocks of the matrix they lie in.

    Rows are sorted by label, so the positives of neighbouring rows are neighbouring columns: their products come from
    small blocks near the diagonal, which is several times faster than gathering two rows for every pair.
    """

    i: Tensor
    j: Tensor
    blocks: tuple[PairBlock, ...]

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """(p, 1) dot products of row i of ``a`` with row j of ``b``."""
        parts = [(a[block.rows] @ b[block.columns].T)[block.i, block.j] for block in self.blocks]
        return torch.cat(parts).unsqueeze(1)

    def add_gradient(self, g: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> None:
        """Add the gradient of `products`, given that of its values, (p, 1)."""
        for block in self.blocks:
            rows, columns = a[block.rows], b[block.columns]
            dense = g.new_zeros(len(rows), len(columns))
            dense[block.i, block.j] = g[block.pairs, 0]
            da[block.rows] += dense @ columns
            db[block.columns] += dense.T @ rows


def list_positive_pairs(problem: PairProblem) -> list[PairList] | None:
    """Every positive pair of a problem whose rows are sorted by label, in lists of bounded length.

    None where classes are so large that a list would be longer work than the tiles, and take more memory.
    """
    start = torch.searchsorted(problem.right.labels, problem.left.labels)
    stop = torch.searchsorted(problem.right.labels, problem.left.labels, right=True)
    counts = stop - start
    ends = counts.cumsum(0)
    found: list[PairList] = []
    row, n, total, passed = 0, len(counts), int(ends[-1]), 0
    if total > MAX_MEAN_POSITIVES * n:
        return None
    while passed < total:
        last = int(torch.searchsorted(ends, min(passed + MAX_LISTED_PAIRS, total)))
        last = max(last + (int(ends[min(last, n - 1)]) <= passed + MAX_LISTED_PAIRS), row + 1)
        i = torch.repeat_interleave(torch.arange(row, last, device=ends.device), counts[row:last])
        first = torch.cat([ends.new_zeros(1), counts[row:last].cumsum(0)[:-1]])
        j = start[i] + torch.arange(len(i), device=i.device) - first[i - row]
        keep = i != j if problem.ref is None else _ids_differ(problem, i, j)
        i, j = (i, j) if keep is None else (i[keep], j[keep])
        if len(i):
            found.append(PairList(i, j, _cut_blocks(i, j, start, stop, row, last)))
        row, passed = last, int(ends[last - 1])
    return found


def _cut_blocks(i: Tensor, j: Tensor, start: Tensor, stop: Tensor, row: int, last: int) -> tuple[PairBlock, ...]:
    """Cut the list where its anchors ``row`` to ``last`` - 1 cross a multiple of `PAIR_BLOCK_ROWS`."""
    firsts = list(range(row, last, PAIR_BLOCK_ROWS))
    lasts = [*firsts[1:], last]
    marks = torch.tensor([*firsts, last], device=i.device)
    cuts = torch.searchsorted(i, marks).tolist()
    low = start[marks[:-1]].tolist()
    high = stop[marks[1:] - 1].tolist()
    return tuple(
        PairBlock(slice(p, q), slice(a, b), slice(c, d), i[p:q] - a, j[p:q] - c)
        for p, q, a, b, c, d in zip(cuts[:-1], cuts[1:], firsts, lasts, low, high, strict=True)
        if p < q
    )


def _ids_differ(problem: PairProblem, i: Tensor, j: Tensor) -> Tensor | None:
    if problem.left.ids is None or problem.right.ids is None:
        return None
    return problem.left.ids[i] != problem.right.ids[j]


def positive_pair_tile(problem: PairProblem, pairs: PairList) -> Tile:
    """A list of pairs as a tile of one column."""
    ref = problem.z if problem.ref is None else problem.ref
    s = _similarity(pairs, problem.z, ref, problem.measure)
    second = None if problem.second is None else _similarity(pairs, *problem.second, problem.measure)
    pos = torch.ones_like(s, dtype=torch.bool)
    a, b = problem.left.original_index[pairs.i, None], problem.right.original_index[pairs.j, None]
    operands = TileOperands(problem.z, ref, pairs.i, pairs.j, problem.measure)
    labels = problem.tile_labels((pairs.i, None), (pairs.j, None))
    return Tile(s, pos, False, a, b, temperature_of(problem.loss), second, operands, *labels)


def _similarity(pairs: PairList, a: Tensor, b: Tensor, measure: str) -> Tensor:
    if measure == "squared":  # by differences: a small distance is not the difference of two large numbers
        return -(a[pairs.i] - b[pairs.j]).square().sum(1, keepdim=True)
    if measure == "euclidean":
        return -safe_sqrt((a[pairs.i] - b[pairs.j]).square().sum(1, keepdim=True))
    return pairs.products(a, b)


def reduce_problem(problem: PairProblem, size: int | None = None) -> dict[str, Tensor]:
    """Everything that the rows accumulate, (n,) or (n, m) each, with gradient to embeddings and parameters."""
    loop = TileLoop(problem, size or (TILE_ROWS // 2 if len(problem.z) <= FEW_ROWS else TILE_ROWS))
    values = _TiledFunction.apply(loop, problem.z, problem.ref, *loop.parameters)
    return dict(zip(loop.names(), values, strict=True))


class _TiledFunction(torch.autograd.Function):
    """Row values as a function of the embeddings; gradients by computing each tile again."""

    @staticmethod
    def forward(ctx, loop: "TileLoop", z: Tensor, ref: Tensor | None, *parameters: Tensor):  # type: ignore[override]
        for current in loop.passes:
            loop.accumulate(current)
        ctx.loop = loop
        ctx.save_for_backward(z, ref, *parameters)
        return tuple(value for values in loop.values for value in values.values())

    @staticmethod
    def backward(ctx, *grads: Tensor | None):  # type: ignore[override]
        if torch.is_grad_enabled():  # create_graph=True: tiles that are computed again have no graph
            return None, *_differentiable_backward(ctx, grads)
        dz, dref, dparameters = ctx.loop.backward(grads)
        return None, dz, dref, *dparameters


def _differentiable_backward(ctx, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The backward pass for ``create_graph=True``: all of the matrix again, with a graph."""
    z, ref, *parameters = ctx.saved_tensors
    problem = replace(ctx.loop.problem, z=z, ref=ref)
    warn_dense_recomputation(len(z), len(z) if ref is None else len(ref))
    values = reference.run_passes(problem, ctx.loop.passes, problem.tile(*problem.whole_blocks()))
    outputs = [values[name].squeeze(1) for name in ctx.loop.names()]
    return differentiable_gradients(outputs, grads, (z, ref, *parameters))


@dataclass(frozen=True)
class Visit:
    """A tile, or a list of pairs, with the rows that it is added to and the rows at its other end."""

    tile: Tile
    anchors: slice | Tensor
    references: slice | Tensor
    ends: Ends
    transposed: bool = False


@dataclass(frozen=True)
class TileBlock:
    """What is computed at once: a block of the matrix seen from one end or from both, or a list of pairs."""

    rows: RowBlock | None
    columns: RowBlock | None
    pairs: PairList | None
    visits: tuple[Visit, ...]


class TileLoop:
    """The tiles of one problem in order, and what its rows have accumulated so far."""

    def __init__(self, problem: PairProblem, size: int):
        self.passes = problem.resolve_passes()
        self.left = problem.left.split_blocks(size)
        self.right = self.left if problem.ref is None else problem.right.split_blocks(size)
        self.problem = replace(problem, z=problem.z.detach(), ref=None if problem.ref is None else problem.ref.detach())
        self.z = self.problem.z
        self.ref = self.z if self.problem.ref is None else self.problem.ref
        pairs: list[PairList] | None = []
        if any(current.as_pair_list for current in self.passes):
            pairs = list_positive_pairs(self.problem) if problem.selection is None else None
        if pairs is None:
            self.passes = [replace(current, as_pair_list=False) for current in self.passes]
        self.pairs = pairs or []
        self.grad_enabled = torch.is_grad_enabled()  # before the autograd function, which switches it off
        self.parameters = problem.parameters() if self.grad_enabled else []
        self.pair_list_tiles: dict[int, Tile] = {}
        self.accumulators: list[dict[str, Accumulator]] = []
        self.values: list[dict[str, Tensor]] = []

    def names(self) -> list[str]:
        """Of all accumulators, in order."""
        return [name for table in self.accumulators for name in table]

    def blocks(self, current: ResolvedPass) -> Iterator[TileBlock]:
        """Everything that a pass looks at: lists of positive pairs, or tiles.

        When both sides are the same rows, tiles above the diagonal serve both of their ends: at once where the
        reductions read no row values, else once from each end.
        """
        if current.as_pair_list:
            for number, pairs in enumerate(self.pairs):
                tile = self._pair_list_tile(number)
                yield TileBlock(None, None, pairs, (Visit(tile, pairs.i, pairs.j, (PairEnd(pairs.i, len(self.z)),)),))
            return
        for k, i in enumerate(self.left):
            for j in self.right[k:] if self.problem.ref is None else self.right:
                if self.problem.is_irrelevant(i, j, positives_only=current.positives_only):
                    continue
                tile = self.problem.tile(i, j)
                mirrored = self.problem.ref is None and i.start != j.start
                rows, columns = TileEnd(i.rows, 1), TileEnd(j.rows, 0)
                if mirrored and current.reads == "none":
                    visits: tuple[Visit, ...] = (Visit(tile, i.rows, j.rows, (rows, columns)),)
                elif mirrored:
                    flipped = Visit(transpose_tile(tile), j.rows, i.rows, (TileEnd(j.rows, 1),), transposed=True)
                    visits = Visit(tile, i.rows, j.rows, (rows,)), flipped
                else:
                    visits = (Visit(tile, i.rows, j.rows, (rows,)),)
                yield TileBlock(i, j, None, visits)

    def _pair_list_tile(self, number: int) -> Tile:
        """A list of positive pairs as a tile, kept for the backward pass."""
        if number not in self.pair_list_tiles:
            self.pair_list_tiles[number] = positive_pair_tile(self.problem, self.pairs[number])
        return self.pair_list_tiles[number]

    def earlier_values(self, current: ResolvedPass, before: int, visit: Visit) -> dict[str, Tensor]:
        """What earlier passes accumulated for the anchors of a visit, as columns, and for its references if read."""
        if current.reads == "none":
            return {}
        values = {name: value for table in self.values[:before] for name, value in table.items()}
        found = {name: value[visit.anchors].unsqueeze(1) for name, value in values.items()}
        if current.reads == "both":
            dim = 0 if isinstance(visit.references, slice) else 1
            found |= {f"{name}ᵀ": value[visit.references].unsqueeze(dim) for name, value in values.items()}
        return found

    def probe_reductions(self, current: ResolvedPass) -> dict[str, Reduction]:
        """The reductions of a pass on a tile of one pair: their names, and whether all will be differentiated.

        The backward pass follows similarities and the parameters of loss and difficulty. The probe has no gradient, so
        a reduction of it that wants one for something else would get a part of its gradient, or none, silently.
        """
        one = slice(0, 1)
        tile = self.problem.probe_tile()
        values = self.earlier_values(current, len(self.accumulators), Visit(tile, one, one, ()))
        with torch.set_grad_enabled(self.grad_enabled):
            found = current.reductions(tile, values)
            differentiable = self.grad_enabled and self.problem.has_differentiable_weights()
            w = current.weights(tile, values) if differentiable else None
        wanting = {n: acc.values for n, acc in found.items() if isinstance(acc.values, Tensor)} | {"the weights": w}
        for name, x in wanting.items():
            if x is None or not x.requires_grad or current.constant:
                continue
            if not all(any(leaf is p for p in self.parameters) for leaf in leaf_tensors(x)):
                raise InputError(
                    f"{name} of {type(self.problem.loss).__name__} want a gradient for something that is neither an "
                    "embedding nor a parameter of the loss: make it an nn.Parameter of the loss, pass engine='dense', "
                    "or use it in row_loss, outside the loss, or as a number"
                )
        return found

    def accumulate(self, current: ResolvedPass) -> None:
        """One forward pass."""
        before, probe = len(self.accumulators), self.probe_reductions(current)
        table = {n: make_accumulator(acc, len(self.z), self.z, self.problem.max_positives) for n, acc in probe.items()}
        with torch.no_grad():
            for block in self.blocks(current):
                for visit in block.visits:
                    values = self.earlier_values(current, before, visit)
                    w = current.weights(visit.tile, values)
                    height, width = visit.tile.similarity.shape
                    for name, acc in current.reductions(visit.tile, values).items():
                        if acc.mask is not False:
                            table[name].add(acc, w, visit.ends, (height, width))
        self.accumulators.append(table)
        self.values.append({name: acc.value() for name, acc in table.items()})

    def backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Last pass first, because it may send gradient to the row values of earlier ones."""
        values = [value for table in self.values for value in table.values()]
        g = {
            name: torch.zeros_like(value) if grad is None else grad.to(value.dtype).clone()
            for name, value, grad in zip(self.names(), values, grads, strict=True)
        }
        dz = torch.zeros_like(self.z)
        dref = dz if self.problem.ref is None else torch.zeros_like(self.ref)
        dparameters = [torch.zeros_like(p) for p in self.parameters]
        for k in reversed(range(len(self.passes))):
            if self.passes[k].constant:
                continue
            for acc in self.accumulators[k].values():
                if isinstance(acc, Gather):
                    acc.rewind()
            for block in self.blocks(self.passes[k]):
                gs = None
                for visit in block.visits:
                    part = self._visit_backward(k, visit, g, dparameters)
                    if part is not None:
                        part = part.T if visit.transposed else part
                        gs = part if gs is None else gs + part
                if gs is not None:
                    self._similarity_backward(gs, block, dz, dref)
        return dz, None if self.problem.ref is None else dref, dparameters

    def _visit_backward(self, k: int, visit: Visit, g: dict[str, Tensor], dparameters: list[Tensor]) -> Tensor | None:
        """Evaluate a pass on a tile again, with a graph: the gradient of its similarities, if any.

        Gradients of earlier row values are added to ``g``, those of parameters to ``dparameters``.
        """
        current = self.passes[k]
        with torch.enable_grad():
            s = visit.tile.similarity.detach().requires_grad_()
            values = {
                name: v.detach().requires_grad_(v.is_floating_point())
                for name, v in self.earlier_values(current, k, visit).items()
            }
            tile = replace(visit.tile, similarity=s, temperature=temperature_of(self.problem.loss))
            w = current.weights(tile, values)
            reductions = current.reductions(tile, values)
        outputs, gradients = reduction_gradients(reductions, w, self.accumulators[k], g, visit.ends)
        if not outputs:
            return None
        inputs = [s, *values.values(), *self.parameters]
        gs, *rest = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        for name, grad in zip(values, rest, strict=False):
            if grad is not None:
                at_reference = name.endswith("ᵀ")
                self._add_row_gradient(g[name.removesuffix("ᵀ")], visit, grad, at_reference)
        for total, grad in zip(dparameters, rest[len(values) :], strict=True):
            if grad is not None:
                total += grad
        if gs is not None and self.problem.measure == "euclidean":  # of −d; go on with that of −d², −gs / 2s
            gs = gs / (-2 * s.detach()).masked_fill(s.detach() == 0, torch.inf)
        return gs

    @staticmethod
    def _add_row_gradient(total: Tensor, visit: Visit, grad: Tensor, at_reference: bool) -> None:
        index = visit.references if at_reference else visit.anchors
        if isinstance(index, slice):
            total[index] += grad.squeeze(0 if at_reference else 1)
        else:
            total.index_add_(0, index, grad.squeeze(1))

    def _similarity_backward(self, gs: Tensor, block: TileBlock, dz: Tensor, dref: Tensor) -> None:
        """From similarities to the embeddings of both sides."""
        squared = self.problem.measure in ("squared", "euclidean")
        if block.pairs is not None:
            pairs = block.pairs
            if squared:
                difference = 2 * gs * (self.ref[pairs.j] - self.z[pairs.i])
                dz.index_add_(0, pairs.i, difference)
                dref.index_add_(0, pairs.j, -difference)
            else:
                pairs.add_gradient(gs, self.z, self.ref, dz, dref)
            return
        assert block.rows is not None
        assert block.columns is not None
        i, j = block.rows.rows, block.columns.rows
        a, b = self.z[i], self.ref[j]
        if squared:
            dref[j] += 2 * (gs.T @ a - gs.sum(0)[:, None] * b)
            dz[i] += 2 * (gs @ b - gs.sum(1)[:, None] * a)
        else:
            dref[j] += gs.T @ a
            dz[i] += gs @ b


def reduction_gradients(
    reductions: dict[str, Reduction],
    w: Tensor | None,
    accumulators: dict[str, Accumulator],
    g: dict[str, Tensor],
    ends: Ends,
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that depend on the tile, with their gradients, ready for one call of autograd."""
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    for name, acc in reductions.items():
        if acc.mask is False:
            continue
        has_gradient = isinstance(acc.values, Tensor) and acc.values.requires_grad
        differentiable = w is not None and w.requires_grad and acc.weighting in ("weight", "square")
        if not (has_gradient or differentiable):
            continue
        constant = replace(acc, values=acc.values.detach()) if isinstance(acc.values, Tensor) else acc
        gx, gw = accumulators[name].gradient(constant, None if w is None else w.detach(), g[name], ends, differentiable)
        if has_gradient:
            assert isinstance(acc.values, Tensor)
            outputs.append(acc.values)
            gradients.append(gx.expand_as(acc.values))
        if differentiable:
            assert w is not None
            assert gw is not None
            gw = gw.sum(2) if gw.ndim == 3 else gw
            outputs.append(w)
            gradients.append((2 * w.detach() * gw if acc.weighting == "square" else gw).expand_as(w))
    return outputs, gradients


def leaf_tensors(x: Tensor) -> list[Tensor]:
    """The leaves of the graph behind a tensor."""
    if x.grad_fn is None:
        return [x]
    found: list[Tensor] = []
    seen: set[Any] = set()
    todo: list[Any] = [x.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo.extend(function for function, _ in node.next_functions)
    return found


def transpose_tile(tile: Tile) -> Tile:
    """The same pairs seen from the other end."""

    def transpose(m):
        return m.T if isinstance(m, Tensor) else m

    return replace(
        tile,
        similarity=tile.similarity.T,
        positive=transpose(tile.positive),
        negative=transpose(tile.negative),
        anchor_index=tile.reference_index.T,
        reference_index=tile.anchor_index.T,
        second_similarity=transpose(tile.second_similarity),
        operands=None if tile.operands is None else tile.operands.transpose(),
        anchor_label=transpose(tile.reference_label),
        reference_label=transpose(tile.anchor_label),
        repeats=transpose(tile.repeats),
        target=transpose(tile.target),
    )
