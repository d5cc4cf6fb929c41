"""Error curves of resampled subjects, and the EER, AUC and TAR of each: what :mod:`mettle.evaluate.intervals` draws."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Replicates:
    """Error curves of every resample: the first row has all weights one, the rest are the replicates.

    Attributes:
        impostor: (1 + b, bins) weighted impostor scores in each bin of the grid.
        genuine: (1 + b, bins) weighted genuine scores in each bin.
        exact: whether the grid holds every distinct score, so that nothing is interpolated.
        seed: of the weights.
        method: in words.
        rows: (b,) which of the draws were usable, ascending.
        weights: (b, S) how often each subject was drawn.
        paired: (S,) masks of the subjects with genuine pairs, and of those with impostor pairs.
    """

    impostor: np.ndarray
    genuine: np.ndarray
    exact: bool
    seed: int
    method: str
    rows: np.ndarray
    weights: np.ndarray
    paired: tuple[np.ndarray, np.ndarray]

    def among(self, metric: str) -> np.ndarray:
        """Mask of the subjects that a metric rests on: who has genuine pairs for TAR, else the rarer kind of pairs."""
        genuine, impostor = self.paired
        return genuine if metric == "tar" or genuine.sum() <= impostor.sum() else impostor

    def curves(self) -> tuple[np.ndarray, np.ndarray]:
        """FMR and FNMR at each grid threshold and at +∞, one row per resample."""
        accepts = np.cumsum(self.impostor[:, ::-1], axis=1)  # from the top, where counts are small and exact
        # The expansion can make a sparse tail negative; rates stay within bounds and never rise with τ.
        rising = np.maximum.accumulate(np.maximum(accepts, 0), axis=1)[:, ::-1]
        fmr = np.append(rising[:, 1:], np.zeros((len(rising), 1)), axis=1) / rising[:, :1]
        rejects = np.cumsum(self.genuine, axis=1)
        return fmr, rejects / rejects[:, -1:]

    def eer(self) -> np.ndarray:
        """EER of each resample, where the path of grid points meets FMR = FNMR."""
        fmr, fnmr = self.curves()
        gap = fmr - fnmr
        at = np.clip((gap >= 0).sum(axis=1) - 1, 0, gap.shape[1] - 2)[:, None]
        x0, g0 = np.take_along_axis(fmr, at, 1)[:, 0], np.take_along_axis(gap, at, 1)[:, 0]
        x1, g1 = np.take_along_axis(fmr, at + 1, 1)[:, 0], np.take_along_axis(gap, at + 1, 1)[:, 0]
        return x0 + np.clip(g0 / np.maximum(g0 - g1, 1e-300), 0, 1) * (x1 - x0)

    def auc(self) -> np.ndarray:
        """AUC of each resample: a bin counts the impostors below it and half of its own."""
        below = np.cumsum(self.impostor, axis=1) - self.impostor / 2
        pairs = self.genuine.sum(axis=1) * self.impostor.sum(axis=1)
        return (self.genuine * below).sum(axis=1) / pairs

    def tar(self, far: float) -> np.ndarray:
        """TAR of each resample at its own threshold: no line between points when the grid is complete."""
        fmr, fnmr = self.curves()
        at = np.argmax(fmr <= far * (1 + 1e-9), axis=1)[:, None]  # +∞ always qualifies
        tar = 1 - np.take_along_axis(fnmr, at, 1)[:, 0]
        if self.exact:
            return tar
        before = np.maximum(at - 1, 0)
        x0, x1 = np.take_along_axis(fmr, before, 1)[:, 0], np.take_along_axis(fmr, at, 1)[:, 0]
        share = np.clip((x0 - far) / np.where(x0 > x1, x0 - x1, 1), 0, 1)
        above = 1 - np.take_along_axis(fnmr, before, 1)[:, 0]
        return np.where(x0 > far, above + share * (tar - above), tar)
