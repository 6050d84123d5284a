"""Trust by rows: a sample's loss and gradient depend on that sample alone, and the sum credits each row to its sample.

That is what privacy needs of a model, and it is looked at by value, on a few rows of a real batch:

1. in other company: one row stays, the others are replaced. Same shape, same kernels: its loss is the same to the bit.
2. alone: the row as a batch of one gives the same loss, to rounding.
3. credit: autograd's gradient of that one loss is what the tape credits to the row, parameter by parameter, and is the
   same in other company.
4. state: what a forward leaves behind does not depend on the rows.
5. collation: the row of ``collate([sample])`` gives the same loss.

The same runs show where the samples are in every operation that parameters meet, however the model reshapes its batch.
Where that cannot be told, the model is right but cannot be followed: it is run sample by sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpscale.engine.combine import gradients
from dpscale.engine.compat import has_hooks, reparametrized, tree_map
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import OpName, Site, Sites, Tape
from dpscale.engine.verify.credit import TapedRun, arrived, by_row, coarseness, credited, insides, levels, misplaced
from dpscale.engine.verify.own import OwnRun
from dpscale.engine.verify.places import ROWS, Obstacle, keeps, places
from dpscale.engine.verify.probe import Draws, DrewUnseen, Growth, Numbered, Probe, Undropped, UndroppedTape
from dpscale.engine.verify.randomness import host_states, own_randomness
from dpscale.engine.verify.rows import Features, companies, copied, count_of, neutral, odd_among, replaced, take
from dpscale.engine.verify.state import Surroundings
from dpscale.engine.verify.values import (
    Gradient,
    added,
    apart,
    changed,
    close,
    distance,
    gradient,
    near,
    relative,
    reshaped,
    rounding,
    same,
    size,
)

SEEDS = 8951, 18170, 2181, 3449, 31952, 5043, 8564, 5347, 10484, 4128, 12521, 49936, 23188, 8426, 1536, 35292
"""For forwards that draw: the first number that torch, random and numpy draw is near 1/32 with the first of these, near
3/32 with the second, and so on, so that what a branch may do with 6% of all draws is seen."""

EXTRA_SEEDS = 4
"""Other draws, and counts of steps, at which a model is looked at that was looked at before."""

_EACH_TIME = (
    "The forward gives something else each time, on the very same batch: it computes with what it changes itself (a "
    "counter, a cache?), so that nothing can be told about its samples. Change that outside of the forward, as a "
    "buffer, or hand it over with the batch."
)

_HIDDEN = (
    "Samples are coupled {}: the gradient of one sample depends on another, though no loss does. {}, or the backward "
    "of a custom autograd function, computes with the whole batch. Let it treat each sample apart, or leave it out."
)

_BACKWARD = _HIDDEN.format("in the backward", "A hook on a tensor or a module")

_COUPLED = (
    "Samples are coupled at {}: what one sample holds reaches another. A per-sample gradient, and so a bound on one "
    "sample's influence, does not exist then. The usual causes are BatchNorm (dpscale.fix(model) puts GroupNorm in its "
    "place), statistics taken over the batch, and a loss that mixes samples or averages over them (use "
    "reduction='none')."
)

_NOWHERE, _SOMEWHERE = "the loss", "an operation that some batches alone run"
"""Where samples meet, if no operation of the forward shows it; and if there are others in other company."""

_PLACE = (
    "The gradient of a sample is another {} than among {}, though its loss is the same. What comes before a layer of "
    "zeros, which hides it from the losses, depends on the other rows, on how many there are, or on a row's place "
    "among them. Let it treat each sample apart, as it would treat it alone."
)

_ASTRAY = "what arrives in a row is not of that row's loss alone: rows change places, or meet"

_ALONE = "an operation cannot be run for one sample ({})"

_MIDDLE, _MIXED = [0.0, 1.0, 0.0], [1.0, -0.75, 0.5]
"""Weights of the rows in two mixtures of their losses."""


@dataclass(frozen=True)
class Subject:
    """What is looked at: ``run`` goes from a batch to one loss per row."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    run: Callable[[Any], Tensor]
    loss_fn: Any = None


@dataclass(frozen=True)
class Finding:
    """What a look found.

    Attributes:
        sites: the operations that parameters meet, and where the samples are in them.
        obstacle: why rows cannot be attributed to samples, if they cannot: then the model runs sample by sample.
        lasting: whether another look at other rows would find the same obstacle.
        draws: whether the forward draws random numbers, dropout left out.
        drops: whether it has dropout.
        eps: of the coarsest numbers that it computes with.
        odd: rows whose loss or gradient is not finite, of which nothing can be compared.
    """

    sites: Sequence[tuple[OpName, Site]] = ()
    obstacle: str | None = None
    lasting: bool = True
    draws: bool = False
    drops: bool = False
    eps: float = 0.0
    odd: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Whole:
    """What a run of the whole batch gave.

    Attributes:
        losses: (B,).
        left: what it left behind.
        credit: what it credits to each of some mixtures of rows; none where that cannot be told.
        rounding: by how much of itself that may be off in another such run.
        astray: whether gradients arrived in rows that they are not of.
        start: where its random numbers began, if not at the seed.
        draws: what was drawn, if each operation was seeded.
    """

    losses: Tensor
    left: Any
    credit: Sequence[Gradient] = ()
    rounding: float = 0.0
    astray: bool = False
    start: list[Any] | None = None
    draws: Mapping[int, Tensor] = field(default_factory=dict)


class Look:
    """One look at a subject.

    Args:
        subject: the model and its losses.
        batch: any batch of it.
        rows: features of its rows, if known.
        kept: the rows to look at, `ROWS` of them.
        singles: rows of the batch that were collated alone, by their place.
        rest: other parts of the batch that these were collated with.
        again: whether such a model was looked at before, at all `SEEDS` if it draws.
        seed: for the runs, and for the choice of company. Apart from anything private.
        own: the run of the step itself, if that may be one of the whole batch.
    """

    def __init__(
        self, subject: Subject, batch: Any, rows: Features | None, kept: Sequence[int], *,
        singles: Mapping[int, Any] | None = None, rest: Sequence[Any] = (), again: bool = False, seed: int = 0,
        own: OwnRun | None = None,
    ) -> None:  # fmt: skip
        self._subject, self._batch, self._features = subject, batch, rows
        self._kept, self._singles, self._again, self._seed, self._own = list(kept), singles or {}, again, seed, own
        self._ahead, self._draws, self._rest = 0, False, list(rest)
        self._afresh = False  # whether generators of the model's own start anew, too
        self._rng = np.random.default_rng(seed)
        self._rows = take(batch, self._kept)
        self._moved: tuple[Any, Any, int] | None = None
        self._apart_among_nothing: tuple[Any, int] | None = None
        self._samples, self._seeded, self._own_draws, self._drops = count_of(batch), False, False, False
        self._eps, self._odd = 0.0, set[int]()
        self._surroundings = Surroundings(subject.model, subject.loss_fn)

    def __call__(self) -> Finding:
        """Raises `UnsupportedModel` for a model that must not be trained."""
        try:
            with torch.autograd.set_detect_anomaly(False):  # rows of nothing may well have gradients that are NaN
                try:
                    finding = self._look()
                except DrewUnseen:  # once more, with every operation seeded
                    self._surroundings.restore()
                    self._give_up_own()
                    self._seeded = True
                    finding = self._look()
        finally:
            changed = self._surroundings.restore(thorough=True)
        self._surroundings.require_parameters_kept(changed)
        return replace(finding, draws=self._seeded or self._draws or self._own_draws, drops=self._drops,
                       eps=self._eps, odd=frozenset(self._odd))  # fmt: skip

    def _look(self) -> Finding:
        growth = self._growth()
        parameters = self._subject.parameters
        base = Probe(parameters, ROWS, self._each, growth) if growth.aligned else self._numbered()
        losses = self._run(base, self._rows)
        self._drops, self._eps = base.drops, base.eps
        # Backwards come before the state is put back: hooks may read what this forward has left.
        sent = [self._sent(base, losses, i) for i in range(ROWS)]
        plain = [
            {key: g for key, g in sent[ROWS // 2].items() if key[0] == "leaf"}, self._plain(base, losses, _MIXED)
        ]  # fmt: skip
        left = self._surroundings.left_behind()
        if not losses.requires_grad:
            raise UnsupportedModel(
                "The losses depend on no trainable parameter. Check requires_grad of the parameters, and that the loss "
                "is computed from the model's output without detach() or no_grad()."
            )
        others = [self._in_other_company(i, base, losses, left) for i in range(ROWS)]
        self._among_nothing(base, losses, left, sent)
        alone = self._alone(base, losses)
        self._collated()
        self._require_no_count(losses)
        self._at_other_draws(base)
        try:
            if not isinstance(base, Probe) or base.lost or any(o is None or o[0].lost for o in others):
                raise Obstacle("which operations run depends on the values in the batch, or on how many rows it has")
            _require_no_hooks(self._subject.parameters)
            sites = places(base, [probe for probe, *_ in others], sent, growth)
            self._check_backward(base, sent, others)
            self._check_credit(base, sites, sent, plain)
            if self._apart_among_nothing is not None:
                self._refuse_gradient(self._rows, *self._apart_among_nothing)
            for i, theirs in alone:
                self._require_credit_near(_leaves(sent[i]), theirs, _one(i), 1, base.eps)
            self._whole_batch(base, losses, sent, sites)
        except Obstacle as obstacle:
            self._give_up_own()
            self._whole_batch(base, losses, sent)
            return Finding((), str(obstacle), obstacle.lasting)
        if self._moved is not None:  # by a little, and its rows are where they were
            self._refuse(*self._moved)
        return Finding([(call.op, site) for call, site in zip(base.calls, sites, strict=True)])

    # Runs

    @property
    def _each(self) -> int | None:
        """The seed of each operation, once it is known that some draw."""
        return self._seed if self._seeded else None

    def _numbered(self, **options: Any) -> Numbered:
        return Numbered(self._each, **options)

    def _give_up_own(self) -> None:
        if self._own is not None:
            self._own.drop()

    def _run(self, mode: Any, data: Any, start: list[Any] | None = None) -> Tensor:
        """The losses of a batch, with all randomness its own; or with the random numbers from a state on."""
        with own_randomness(self._seed if start is None else start), torch.enable_grad(), mode:
            if self._ahead:
                self._surroundings.count_ahead(self._ahead)
            if self._afresh:
                self._surroundings.draw_from(self._seed)
            before = host_states()
            losses = self._subject.run(copied(data))
            self._draws |= host_states() != before
            self._own_draws |= self._surroundings.drew()
            return losses

    def _growth(self) -> Growth:
        """Which tensors have a row for each sample."""
        few, more = self._numbered(), self._numbered()
        for mode, data in ((few, self._rows), (more, take(self._rows, [*range(ROWS), 0]))):
            try:
                self._run(mode, data)
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception as error:
                self._blame(error)
            finally:
                self._surroundings.restore()
        return Growth(few.ran, more.ran)

    def _blame(self, error: Exception) -> None:
        """A model that fails on its own batch is not for us to judge; one that fails on fewer rows only, is."""
        self._surroundings.restore()
        with own_randomness(self._seed), torch.enable_grad(), Undropped():  # watched, so that no recorder begins
            self._subject.run(self._batch)  # raises what the user would see without us
        raise UnsupportedModel(
            f"The model takes this batch but not {ROWS} rows of it ({type(error).__name__}: {error}). A loss that "
            "needs a certain number of rows is not one loss per sample. Let the forward take any number of rows."
        ) from error

    def _sent(self, mode: Any, losses: Tensor, i: int) -> Gradient:
        """What the loss of row i sends to each operation that parameters meet, and to the parameters."""
        if not isinstance(mode, Probe):
            return {}
        targets: dict[Any, Any] = {(*call.name_of, k): e for call in mode.calls for k, e in call.edges.items()}
        targets |= {("leaf", n): t for n, t in mode.leaves.items()}
        return gradient(losses, _one(i), targets)

    # 1, 3, 4: in other company

    def _in_other_company(self, i: int, base: Any, ours: Tensor, left: Any) -> Any:
        """Row i with others around it: its loss, and the state afterwards, are what they were."""
        found: Any = None
        for data in around(self._rows, i, self._batch, self._features, self._rng):
            probe = Probe(self._subject.parameters, ROWS, self._each, like=base) if isinstance(base, Probe) else None
            mode = probe or self._numbered()
            try:
                losses = self._run(mode, data)
                sent = self._sent(mode, losses, i)
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # rows that were put together need not be such as the model takes
                self._surroundings.restore()
                continue
            self._settle(base, mode, data, ours, losses, i, left)
            found = mode, sent, data
            if probe is None or (not probe.lost and len(probe.calls) == len(base.calls)):
                break  # others may run other operations, where a model asks whether a mask is all ones
        return found

    def _settle(self, base: Any, mode: Any, data: Any, ours: Tensor, losses: Tensor, i: int, left: Any) -> None:
        """Row i and the state are what they were on our rows."""
        theirs = self._surroundings.left_behind()
        self._unmoved(base, mode, self._rows, data, ours, losses, i)
        self._surroundings.compare(left, theirs)

    def _check_backward(self, base: Probe, sent: Sequence[Gradient], others: Sequence[Any]) -> None:
        """In other company the loss of a row sends the same gradients to the same places, and to the parameters.

        To both: a layer of zeros sends nothing back, and its own gradient is made of its input.
        """
        for i, (probe, theirs, data) in enumerate(others):
            if any(key in theirs and theirs[key].shape != g.shape for key, g in sent[i].items()):
                raise Obstacle("shapes depend on the values in the batch")
            alike = base.device.type == "cpu" and [op.outputs for op in base.ran] == [op.outputs for op in probe.ran]
            for leaves in (False, True):
                one, other = ({k: g for k, g in all.items() if (k[0] == "leaf") is leaves} for all in (sent[i], theirs))
                if apart(one, other, 1e-4 if alike else probe.eps**0.5) is None:
                    continue
                if leaves:  # nothing but what parameters meet is another
                    self._refuse_gradient(self._rows, data, i)
                raise UnsupportedModel(_BACKWARD)

    def _among_nothing(self, base: Any, ours: Tensor, left: Any, sent: Sequence[Gradient]) -> None:
        """Each row with empty ones around it."""
        for i in range(ROWS):
            mode, data = self._numbered(), replaced(self._rows, neutral(self._rows), [i])
            try:
                losses = self._run(mode, data)
                one = gradient(losses, _one(i), self._subject.parameters) if i == ROWS // 2 else {}
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # a model need not take them
                self._surroundings.restore()
                return
            self._settle(base, mode, data, ours, losses, i, left)
            if one and isinstance(base, Probe):
                mine, eps = _leaves(sent[i]), reshaped(max(base.eps, mode.eps))
                finite = np.isfinite(size(one)) and np.isfinite(size(mine))  # nothing may well have no gradient
                if finite and apart(one, mine, eps) is not None:
                    self._apart_among_nothing = data, i

    def _unmoved(self, base: Any, mode: Any, ours: Any, theirs: Any, a: Tensor, b: Tensor, i: int) -> None:
        """Refuse a row whose loss is another in other company.

        Rounding is no reason where operations had other shapes (a model that asks whether its mask is all ones). Where
        they had not, rows may have changed places (sorted, routed): that is right if they are run sample by sample.
        """
        if same(a[i], b[i]):
            return
        eps = max(base.eps, mode.eps)
        if not near(a[i], b[i], a, eps, rounding(eps)):
            self._refuse(ours, theirs, i)
        if [op.outputs for op in base.ran] == [op.outputs for op in mode.ran]:
            self._moved = ours, theirs, i

    def _whole_batch(
        self, base: Any, few: Tensor, sent: Sequence[Gradient], sites: Sequence[Site] | None = None
    ) -> None:
        """In the whole batch, too, rows keep losses and gradients: when the others become copies of one, and beside how
        they are among few. Gradients arrive in the rows that they are of, whatever the others send."""
        known = None if sites is None else _known(base, sites)
        draws = base.draws_freely or self._draws or self._own_draws
        several, first, last = sorted(set(self._kept[: max(1, self._samples // 2)])), self._kept[0], self._kept[-1]
        # The second is that of a glance, which may have seen something there. What rows are among few shows what comes
        # of an extreme one. If they draw other numbers there, two rows are put among copies of themselves: one of them
        # is not extreme.
        ways = [(several, first), ([last], last), ([first], first)][: 3 if draws else 1 + self._again]
        ways = ways if self._samples > 1 else []
        level = levels([size(_leaves(each)) for each in sent])
        weights = [by_row(keep, [level[self._kept.index(i)] for i in keep]) for keep, _ in ways]
        ours = self._first_whole(known, base, [*weights, by_row(self._kept, level)])
        self._odd |= odd_among(ours.losses)
        if not self._odd & {*self._kept}:
            self._odd |= {i for i, weight in zip(self._kept, level, strict=True) if not weight}
        for k, (keep, other) in enumerate(ways):
            self._in_whole_company(known, base, ours, k, keep, other, weights[k])
        if ours.draws and self._samples > ROWS:
            self._as_among_few_that_drew_alike(base, ours, level)
        elif not draws and ways:
            self._as_among_few(known, base, ours, few, sent, level)
        if ours.astray:
            raise Obstacle(_ASTRAY)

    def _first_whole(self, known: Sites | None, base: Any, weights: Sequence[Mapping[int, float]]) -> _Whole:
        """The step's own run, if there is one that others can be compared with."""
        if known is None:
            return self._whole(known, base, self._batch, weights)
        if base.draws_freely:  # numbers are the same for all companies only if each operation is seeded
            astray = self._taped(Tape, known, self._batch, weighted=True).astray
            return replace(self._whole(known, base, self._batch, weights), astray=astray)
        own = None if self._own is None else self._own(known, self._surroundings, self._seed)
        run = own or self._taped(Tape, known, self._batch, weighted=True)
        start = None if self._own is None or own is None else self._own.before
        credit = self._credited(run, weights)
        return _Whole(run.losses, run.left, credit, coarseness(run), run.astray, start)

    def _whole(
        self, known: Sites | None, base: Any, data: Any, weights: Sequence[Mapping[int, float]],
        start: list[Any] | None = None, *, bare: bool = False,
    ) -> _Whole:  # fmt: skip
        """A run of as many rows as the batch has, ``bare`` of dropout; taped, unless each operation must be seeded."""
        if known is not None and not base.draws_freely:
            run = self._taped(UndroppedTape if bare else Tape, known, data, start)
            return _Whole(run.losses, run.left, self._credited(run, weights), coarseness(run))
        mode = self._numbered()
        losses = self._run(mode, data, start)
        credit: list[Gradient] = []
        if known is not None:
            seeds = [[each.get(i, 0.0) for i in range(len(losses))] for each in weights]
            credit = [gradient(losses, seed, self._subject.parameters) for seed in seeds]
        left = self._surroundings.left_behind()
        return _Whole(losses.detach(), left, credit, reshaped(base.eps), draws=mode.draws)

    def _taped(
        self, tape: type[Tape], known: Sites, data: Any, start: list[Any] | None = None, *, weighted: bool = False
    ) -> TapedRun:
        """What these rows have not met is looked at when it comes."""
        mode = tape(self._subject.parameters, None, known, count_of(data), lenient=True)
        losses = self._run(mode, data, start)
        within = insides(mode) if not mode.lost and losses.requires_grad else []
        grads = arrived(losses, within)
        astray = weighted and misplaced(losses, within, self._seed, grads, keep=False) is not None
        return TapedRun(mode, losses.detach(), grads, astray, self._surroundings.left_behind(), [])

    @staticmethod
    def _credited(run: TapedRun, weights: Sequence[Mapping[int, float]]) -> list[Gradient]:
        try:
            return [credited(run, each) for each in weights] if run.grads else []
        except (UnsupportedModel, RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            raise Obstacle(_ALONE.format(error)) from error

    def _in_whole_company(
        self, known: Sites | None, base: Any, ours: _Whole, k: int, keep: Sequence[int], other: int,
        weights: Mapping[int, float],
    ) -> None:  # fmt: skip
        """Some rows of the whole batch among copies of one. To rounding: rows that are packed are of other shapes."""
        data = replaced(self._batch, take(self._batch, [other] * self._samples), keep)
        theirs = self._whole(known, base, data, [weights], ours.start)
        for i in keep:
            if not near(ours.losses[i], theirs.losses[i], ours.losses, base.eps, rounding(base.eps)):
                self._refuse(self._batch, data, i)
        self._surroundings.compare(ours.left, theirs.left)
        if not ours.credit or not theirs.credit or apart(ours.credit[k], theirs.credit[0], ours.rounding) is None:
            return
        if ours.astray or (known is not None and self._taped(Tape, known, data, ours.start, weighted=True).astray):
            raise Obstacle(_ASTRAY)
        self._refuse_gradient(self._batch, data, keep[0])

    def _as_among_few(
        self, known: Sites | None, base: Any, ours: _Whole, few: Tensor, sent: Sequence[Gradient],
        level: Sequence[float],
    ) -> None:  # fmt: skip
        """The rows that are looked at have the losses and gradients that they have among few; without dropout, as
        those."""
        if base.drops:
            ours = self._whole(known, base, self._batch, [by_row(self._kept, level)], bare=True)
        for k, i in enumerate(self._kept):
            self._require_near(k, few, ROWS, ours.losses[i], self._samples, base.eps, ours.losses)
        if ours.credit and not ours.astray:
            mixture = added([_leaves(each) for each in sent], level)
            self._require_credit_near(mixture, ours.credit[-1], level, self._samples, base.eps)

    def _as_among_few_that_drew_alike(self, base: Any, ours: _Whole, level: Sequence[float]) -> None:
        """The same of a model that draws: few rows are given what was drawn for them in the whole batch."""
        drawn = ours.draws, self._kept, self._samples
        mode = self._numbered(draws=drawn)
        few = self._run(mode, self._rows)
        mixture = gradient(few, level, self._subject.parameters)
        drew = self._surroundings.drew()
        self._surroundings.restore()
        if drew or mode.unmatched:
            return
        for k, i in enumerate(self._kept):
            self._require_near(k, few, ROWS, ours.losses[i], self._samples, base.eps, ours.losses)
        if ours.credit and not ours.astray:
            self._require_credit_near(mixture, ours.credit[-1], level, self._samples, base.eps, drawn)

    def _require_credit_near(
        self, ours: Gradient, theirs: Gradient, level: Sequence[float], others: int, eps: float,
        draws: Draws | None = None,
    ) -> None:  # fmt: skip
        """A mixture of rows has the gradient among so many others that it has among ours."""
        if not np.isfinite(size(ours)) or apart(theirs, ours, reshaped(eps)) is None:
            return  # one odd row among ours is enough for that; they are looked at without it
        if distance(ours, theirs) <= 8 * max(distance(ours, each) for _, each in self._nudged(eps, draws, level)):
            return
        raise UnsupportedModel(_PLACE.format(f"among {others} rows" if others > 1 else "alone", ROWS))

    def _require_near(
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

    def _require_no_count(self, losses: Tensor) -> None:
        """A number that the forward itself changes must not be computed with: a compiled step would have it in it."""
        if not self._surroundings.count_ahead(0, buffers=False):
            return
        with own_randomness(self._seed), torch.enable_grad(), self._numbered():
            self._surroundings.count_ahead(1, buffers=False)
            later = self._subject.run(self._rows)
        self._surroundings.restore()
        if not same(losses, later):
            raise UnsupportedModel(_EACH_TIME)

    def _at_other_draws(self, base: Numbered) -> None:
        """The same with other random numbers, and as many steps later as the forward itself may count."""
        counts = self._surroundings.count_ahead(0)
        if not (base.draws_freely or self._draws or self._own_draws or counts):
            return
        seed, self._afresh = self._seed, True
        seeds = [seed + 7919 * (k + 1) for k in range(EXTRA_SEEDS)] if self._again else SEEDS
        for k, self._seed in enumerate(seeds):
            self._ahead = 2**k if counts else 0
            i = k % ROWS
            own, mode = Numbered(self._seed), Numbered(self._seed)
            ours, sent, left = self._sent_plainly(own, self._rows, i)
            data = replaced(self._rows, take(self._batch, self._rng.integers(self._samples, size=ROWS).tolist()), [i])
            losses, theirs, left_then = self._sent_plainly(mode, data, i)
            self._unmoved(own, mode, self._rows, data, ours, losses, i)
            self._surroundings.compare(left, left_then)
            if apart(sent, theirs, reshaped(max(own.eps, mode.eps))) is not None:
                self._refuse_gradient(self._rows, data, i)
        self._seed, self._ahead, self._afresh = seed, 0, False

    def _sent_plainly(self, mode: Numbered, data: Any, i: int) -> tuple[Tensor, Gradient, Any]:
        """The losses of a run, what that of row i sends to the parameters, and what the run has left behind."""
        losses = self._run(mode, data)
        sent = gradient(losses, _one(i), self._subject.parameters)
        return losses, sent, self._surroundings.left_behind()

    def _refuse(self, ours: Any, theirs: Any, i: int) -> None:
        """Say where samples meet; unless the forward is another each time, on the very same rows."""
        again = []
        for _ in range(2):
            again.append(self._run(Numbered(self._seed), ours).detach())
            self._surroundings.restore()
        if not same(again[0][i], again[1][i]):
            apart = (again[0][i] - again[1][i]).abs()
            if again[0].device.type != "cpu" and bool(apart <= 1e-3 * again[0][i].abs().clamp(min=1)):
                return  # kernels that add up in another order each time
            raise UnsupportedModel(_EACH_TIME)
        raise UnsupportedModel(_COUPLED.format(self._where(ours, theirs, i)))

    def _refuse_gradient(self, ours: Any, theirs: Any, i: int) -> None:
        """Say where samples meet, though no loss shows it: before a layer of zeros, or in the backward alone."""
        where = self._where(ours, theirs, i)
        cause = "What comes before a layer of zeros, which hides it from the losses, or a hook"
        raise UnsupportedModel(_BACKWARD if where == _NOWHERE else _HIDDEN.format(f"at {where}", cause))

    def _where(self, ours: Any, theirs: Any, i: int) -> str:
        """The first operation at which the kept row becomes another one."""
        samples = count_of(ours)
        runs = []
        for data in (ours, theirs, take(ours, [*range(samples), 0])):
            mode = Numbered(self._seed, keep=True)
            try:
                self._run(mode, data)
            except Exception:
                return _NOWHERE
            finally:
                self._surroundings.restore()
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

    # 2 and 5: alone

    def _alone(self, base: Any, losses: Tensor) -> list[tuple[int, Gradient]]:
        """Rows as batches of one: the rarest, and another. What the first of them sends to the parameters."""
        found: list[tuple[int, Gradient]] = []
        for i in (1,) if self._again else (1, 0):
            mode = self._numbered(draws=(base.draws, [i], ROWS))
            try:
                alone = self._run(mode, take(self._rows, [i]))
                theirs = {} if found else gradient(alone, [1.0], self._subject.parameters)
            except (UnsupportedModel, DrewUnseen):
                raise
            except (
                Exception
            ):  # a model may need two rows (squeeze); what depends on their number shows above all the same
                continue
            finally:
                drew = self._surroundings.drew()
                self._surroundings.restore()
            if drew or mode.unmatched or alone.shape != (1,):
                continue
            self._require_near(i, losses, ROWS, alone[0], 1, max(base.eps, mode.eps))
            if not found:
                found.append((i, theirs))
        return found

    def _by_rounding(self, i: int, apart: Tensor, eps: float) -> bool:
        """Whether inputs and parameters that are off by rounding change the loss of row i as much: large terms that
        cancel in it."""
        first = self._run(Numbered(self._seed), self._rows)[i].detach().double()
        self._surroundings.restore()
        losses = [losses[i].detach().double() for losses, _ in self._nudged(eps, None, [])]
        return bool(apart.detach().double().abs() <= 8 * (torch.stack(losses) - first).abs().max())

    def _nudged(self, eps: float, draws: Draws | None, level: Sequence[float]) -> list[tuple[Tensor, Gradient]]:
        """Losses, and the gradient of a mixture, of our rows with inputs and parameters off by rounding: units that are
        nearly zero switch."""
        found = []
        for k in range(3):
            data = tree_map(partial(self._off_by, eps, seed=k), self._rows)
            values = {n: self._off_by(eps, p.detach(), k).requires_grad_() for n, p in self._subject.parameters.items()}
            with reparametrized(self._subject.model, values):
                losses = self._run(Numbered(self._seed, draws=draws), data)
            found.append((losses.detach(), gradient(losses, level, values) if level else {}))
            self._surroundings.restore()
        return found

    def _off_by(self, eps: float, t: Any, seed: int) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        rounded = np.random.default_rng((self._seed, seed, t.numel()))
        off = torch.from_numpy(rounded.uniform(-eps, eps, tuple(t.shape))).to(t.device)
        return (t.double() * (1 + off)).to(t.dtype)

    def _collated(self) -> None:
        """Rows as ``collate_fn`` gives them for one sample alone. It may have put them into another order."""
        if not self._singles:
            return
        together = self._numbered()
        losses = torch.cat([self._run(together, part).detach() for part in (self._batch, *self._rest)])
        self._surroundings.restore()
        for single in self._singles.values():
            alone = self._numbered()
            try:
                own = self._run(alone, single)[0]
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # a model may need several
                continue
            finally:
                self._surroundings.restore()
            eps = max(together.eps, alone.eps)
            if not (together.draws or alone.draws) and not any(close(loss, own, losses, eps) for loss in losses):
                raise UnsupportedModel(
                    f"A sample that is collated alone has the loss {own.item():.6g}; among others, as collate_fn puts "
                    "it, no row has. What collate_fn makes of one sample (its padding) depends on the others. Mask the "
                    "padding in the model and in the loss, or pad to a fixed length."
                )

    # 3: credit

    def _check_credit(
        self, base: Probe, sites: Sequence[Site], sent: Sequence[Gradient], plain: Sequence[Gradient]
    ) -> None:
        """The tape's gradients are autograd's: of the row in the middle, norm included, and of a mixture of all rows.

        Were rows credited to other samples, the mixture would be another one.
        """
        base.ops = [
            replace(call.taped, site=site, function=(site.rule is None and call.again) or call.op.function)
            for call, site in zip(base.calls, sites, strict=True)
            if call.taped is not None and site.role in ("rows", "expanded")
        ]
        keys = [(*call.name_of, k) for call in base.calls for k in call.edges]
        for way, name in (key for each in plain for key in each):
            if way == "past":
                raise Obstacle(
                    f"parameter {name!r} is used where its operations cannot be seen (a compiled or scripted part, a "
                    "custom autograd function)"
                )
        mixtures = torch.tensor([_MIDDLE, _MIXED], device=base.device)
        together = added(sent)
        try:
            with torch.no_grad(), torch.autocast(base.device.type, enabled=False):
                forms = gradients([base], [[together.get(key) for key in keys]])
                norms = torch.stack([form.norm2() for form in forms.values()]).sum(0).sqrt() if forms else None
        except UnsupportedModel as error:
            raise Obstacle(str(error)) from error
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            raise Obstacle(_ALONE.format(error)) from error
        close_to = max(1e-9, base.eps**0.5)
        # A norm counts in what underflow can take from it, so that of a gradient of nothing is not quite nothing.
        least = 1e-9 * max(map(size, plain)) + 1e-17
        for weights, theirs in zip(mixtures, plain, strict=True):
            with torch.no_grad():
                ours = {("leaf", n): form.weighted(weights) for n, form in forms.items()}
            whole = size(theirs)
            if not np.isfinite(whole):
                continue
            if (name := apart(ours, theirs, close_to)) is not None:
                raise Obstacle(f"what is credited to a row is not its gradient at parameter {name[1]!r}")
            off = relative(close_to) * whole + least
            if weights[0] == 0 and norms is not None and abs(float(norms[1]) - whole) > off:
                raise Obstacle("the norm that is credited to a row is not that of its gradient")

    def _plain(self, base: Any, losses: Tensor, weights: Sequence[float]) -> Gradient:
        """Autograd's gradient of a weighted sum of the losses, by way of what was taped, and past it."""
        if not isinstance(base, Probe):
            return {}
        parameters = self._subject.parameters
        targets = {("leaf", n): t for n, t in base.leaves.items()} | {("past", n): t for n, t in parameters.items()}
        return gradient(losses, weights, targets)


def _one(i: int) -> list[float]:
    """Weights of our rows: row i alone."""
    return [float(k == i) for k in range(ROWS)]


def _known(base: Probe, sites: Sequence[Site]) -> Sites:
    known = Sites()
    for call, site in zip(base.calls, sites, strict=True):
        known.add(call.op, site)
    return known


def _leaves(sent: Gradient) -> Gradient:
    """Of what a loss sends back, what arrives at parameters, by their names."""
    return {name: g for (kind, name, *_), g in sent.items() if kind == "leaf"}


def _require_no_hooks(parameters: Mapping[str, Tensor]) -> None:
    """A hook on a parameter sees its gradient, which a tape never makes."""
    for name, p in parameters.items():
        if has_hooks(p):
            raise Obstacle(f"parameter {name!r} has a hook (register_hook), which needs its gradient as a whole")


def around(rows: Any, i: int, batch: Any, features: Features | None, rng: np.random.Generator) -> list[Any]:
    """The rows with others in the place of all but row i: a few ways, should a model not take one.

    First for the row in the middle, the rarest: among copies of itself, which shows what counts rows that are alike;
    for the first: among others of the batch; for the last: among copies of an extreme one.
    """
    others = companies(count_of(batch), features, ROWS, rng)
    ways = [take(rows, [i] * ROWS), *(replaced(rows, take(batch, way), [i]) for way in others)]
    first = (1, 0, 2)[i]
    return [*ways[first:], *ways[:first]]
