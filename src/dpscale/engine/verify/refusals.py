"""What is said of a model that must not be trained, and when a difference is rounding."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscale.engine.compat import reparametrized, tree_map
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.verify.collation import Alone
from dpscale.engine.verify.places import ROWS, keeps
from dpscale.engine.verify.probe import Draws, Numbered
from dpscale.engine.verify.rows import count_of, take
from dpscale.engine.verify.runs import Runs
from dpscale.engine.verify.values import Gradient, apart, changed, distance, near, reshaped, same, size

EACH_TIME = (
    "The forward gives something else each time, on the very same batch: it computes with what it changes itself (a "
    "counter, a cache?), so that nothing can be told about its samples. Change that outside of the forward, as a "
    "buffer, or hand it over with the batch."
)

RATE = (
    "Dropout goes by the batch, or what else the forward draws: whether, at which rate, or with which mean or spread "
    "is another for other rows, or for another number of them. Draw alike for every batch."
)

SEEDED = (
    "The forward seeds torch's generator by what is in the samples (torch.manual_seed): what is drawn then, for every "
    "sample and at the next step, depends on all of them. Seed outside of the forward, by a number that does not come "
    "from the data."
)

_HIDDEN = (
    "Samples are coupled {}: the gradient of one sample depends on another, though no loss does. {}, or the backward "
    "of a custom autograd function, computes with the whole batch. Let it treat each sample apart, or leave it out."
)

BACKWARD = _HIDDEN.format("in the backward", "A hook on a tensor or a module")

_COUPLED = (
    "Samples are coupled at {}: what one sample holds reaches another. A per-sample gradient, and so a bound on one "
    "sample's influence, does not exist then. The usual causes are BatchNorm (dpscale.fix(model) puts GroupNorm in its "
    "place), statistics taken over the batch, and a loss that mixes samples or averages over them (use "
    "reduction='none')."
)

_PLACE = (
    "The gradient of a sample is another {} than among {}, though its loss is the same. What comes before a layer of "
    "zeros, which hides it from the losses, depends on the other rows, on how many there are, or on a row's place "
    "among them. Let it treat each sample apart, as it would treat it alone."
)

_NOWHERE, _SOMEWHERE = "the loss", "an operation that some batches alone run"
"""Where samples meet, if no operation of the forward shows it; and if there are others in other company."""


class Refusals:
    """Judges differences between runs of a few rows, or of a batch, and says where they come from.

    Args:
        runs: of the subject.
        rows: the few rows.
    """

    def __init__(self, runs: Runs, rows: Any) -> None:
        self._runs, self._rows = runs, rows

    def refuse(self, ours: Any, theirs: Any, i: int) -> None:
        """Say where samples meet; unless the forward is another each time, on the very same rows."""
        again = []
        for _ in range(2):
            again.append(self._runs.losses(Numbered(self._runs.seed), ours).detach())
            self._runs.surroundings.restore()
        if not same(again[0][i], again[1][i]):
            off = (again[0][i] - again[1][i]).abs()
            if again[0].device.type != "cpu" and bool(off <= 1e-3 * again[0][i].abs().clamp(min=1)):
                return  # kernels that add up in another order each time
            raise UnsupportedModel(EACH_TIME)
        raise UnsupportedModel(_COUPLED.format(self._where(ours, theirs, i)))

    def refuse_gradient(self, ours: Any, theirs: Any, i: int) -> None:
        """Say where samples meet, though no loss shows it: before a layer of zeros, or in the backward alone."""
        where = self._where(ours, theirs, i)
        cause = "What comes before a layer of zeros, which hides it from the losses, or a hook"
        raise UnsupportedModel(BACKWARD if where == _NOWHERE else _HIDDEN.format(f"at {where}", cause))

    def _where(self, ours: Any, theirs: Any, i: int) -> str:
        """The first operation at which the kept row becomes another one."""
        samples = count_of(ours)
        runs = []
        for data in (ours, theirs, take(ours, [*range(samples), 0])):
            mode = Numbered(self._runs.seed, keep=True)
            try:
                self._runs.losses(mode, data)
            except Exception:
                return _NOWHERE
            finally:
                self._runs.surroundings.restore()
            runs.append(mode)
        if any([op.function for op in run.ran] != [op.function for op in runs[0].ran] for run in runs):
            return _SOMEWHERE
        for k, op in enumerate(runs[0].ran):
            for a, b, more in zip(*(run.outputs[k] for run in runs), strict=True):
                if a.shape != b.shape:
                    return str(getattr(op.function, "__name__", _NOWHERE))
                moved = changed(a, b)
                if bool(moved.any()) and not keeps(moved, more.shape, samples, i):
                    return str(getattr(op.function, "__name__", _NOWHERE))
        return _NOWHERE

    def require_near(
        self, i: int, ours: Tensor, rows: int, theirs: Tensor, others: int, eps: float, among: Tensor | None = None
    ) -> None:
        """A row among so many others, with these losses, has the loss that it has among ours."""
        scale = ours if among is None else torch.cat([ours, among.to(ours.dtype)])
        if near(ours[i], theirs, scale, eps) or self._by_rounding(i, ours[i] - theirs, eps):
            return
        raise UnsupportedModel(
            f"The loss of a sample is {ours[i].item():.6g} among {rows} rows and {theirs.item():.6g} "
            f"{f'among {others}' if others > 1 else 'alone'}. It depends on how many rows are in the batch, so it is "
            "not the loss of one sample: divide by counts of the sample itself, never by the batch's, and let no "
            "padding enter a mean."
        )

    def require_credit_near(
        self, ours: Gradient, theirs: Gradient, level: Sequence[float], others: int, eps: float,
        draws: Draws | None = None,
    ) -> None:  # fmt: skip
        """A mixture of rows has the gradient among so many others that it has among ours."""
        if not np.isfinite(size(ours)) or apart(theirs, ours, reshaped(eps)) is None:
            return  # one odd row among ours is enough for that; they are looked at without it
        if distance(ours, theirs) <= 8 * max(distance(ours, each) for _, each in self._nudged(eps, draws, level)):
            return
        raise UnsupportedModel(_PLACE.format(f"among {others} rows" if others > 1 else "alone", ROWS))

    def refuse_collated(self, alone: Alone, nearest: float) -> None:
        """A sample that is collated alone is no row of the batch: the gradient of the nearest that has its loss is so
        far from its own."""
        if np.isfinite(nearest):
            nudged = self._nudged(alone.eps, None, [1.0], alone.data)
            if nearest <= 8 * max(distance(alone.gradient, each) for _, each in nudged):
                return
        what = "a gradient" if np.isfinite(nearest) else f"the loss {alone.loss.item():.6g}"
        raise UnsupportedModel(
            f"A sample that is collated alone has {what}; among others, as collate_fn puts it, no row has it. What "
            "collate_fn makes of one sample (its padding) depends on the others. Mask the padding in the model and in "
            "the loss, or pad to a fixed length."
        )

    def _by_rounding(self, i: int, off: Tensor, eps: float) -> bool:
        """Whether inputs and parameters that are off by rounding change the loss of row i as much: large terms that
        cancel in it."""
        first = self._runs.losses(Numbered(self._runs.seed), self._rows)[i].detach().double()
        self._runs.surroundings.restore()
        losses = [losses[i].detach().double() for losses, _ in self._nudged(eps, None, [])]
        return bool(off.detach().double().abs() <= 8 * (torch.stack(losses) - first).abs().max())

    def _nudged(
        self, eps: float, draws: Draws | None, level: Sequence[float], rows: Any = None
    ) -> list[tuple[Tensor, Gradient]]:
        """Losses, and the gradient of a mixture, of our rows or of others with inputs and parameters off by rounding:
        units that are nearly zero switch."""
        runs, found = self._runs, []
        for k in range(3):
            data = tree_map(partial(self._off_by, eps, seed=k), self._rows if rows is None else rows)
            parameters = runs.subject.parameters
            values = {n: self._off_by(eps, p.detach(), k).requires_grad_() for n, p in parameters.items()}
            with reparametrized(runs.subject.model, values):
                losses = runs.losses(Numbered(runs.seed, draws=draws), data)
            found.append((losses.detach(), runs.gradient(losses, level, values) if level else {}))
            runs.surroundings.restore()
        return found

    def _off_by(self, eps: float, t: Any, seed: int) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        rounded = np.random.default_rng((self._runs.seed, seed, t.numel()))
        off = torch.from_numpy(rounded.uniform(-eps, eps, tuple(t.shape))).to(t.device)
        return (t.double() * (1 + off)).to(t.dtype)
