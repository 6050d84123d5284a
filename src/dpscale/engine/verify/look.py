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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscale.engine.combine import Forms, exactly, gradients
from dpscale.engine.compat import has_hooks
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import OpName, Site, Sites
from dpscale.engine.verify.collation import Alone, farness
from dpscale.engine.verify.credit import among
from dpscale.engine.verify.own import OwnRun
from dpscale.engine.verify.places import ROWS, Obstacle, places
from dpscale.engine.verify.probe import DrewUnseen, Growth, Numbered, Probe, Undropped, drop_alike
from dpscale.engine.verify.randomness import own_randomness
from dpscale.engine.verify.refusals import BACKWARD, EACH_TIME, RATE, SEEDED, Refusals
from dpscale.engine.verify.rows import Features, count_of, extreme_rows, neutral, odd_among, replaced, take
from dpscale.engine.verify.runs import Runs, Subject
from dpscale.engine.verify.values import (
    Gradient,
    added,
    apart,
    gradient,
    near,
    relative,
    reshaped,
    rounding,
    same,
    size,
)
from dpscale.engine.verify.whole import ALONE, ASTRAY, WholeBatch

SEEDS = 8951, 18170, 2181, 3449, 31952, 5043, 8564, 5347, 10484, 4128, 12521, 49936, 23188, 8426, 1536, 35292
"""For forwards that draw: the first number that torch, random and numpy draw is near 1/32 with the first of these, near
3/32 with the second, and so on, so that what a branch may do with 6% of all draws is seen."""

EXTRA_SEEDS = 4
"""Other draws, and counts of steps, at which a model is looked at that was looked at before."""

_MIXED = [1.0, -0.75, 0.5]
"""Weights of the rows in a mixture of their losses."""


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
        self._kept, self._singles, self._again, self._own = list(kept), singles or {}, again, own
        self._rest = list(rest)
        self._rng = np.random.default_rng(seed)
        self._rows = take(batch, self._kept)
        self._runs = Runs(subject, seed)
        self._surroundings = self._runs.surroundings
        self._refusals = Refusals(self._runs, self._rows)
        self._probes: list[Probe] = []
        self._moved: tuple[Any, Any, int] | None = None
        self._grown: list[Tensor] = []  # losses of the rows, and with one of them once more
        self._drops, self._eps, self._odd = False, 0.0, set[int]()

    def __call__(self) -> Finding:
        """Raises `UnsupportedModel` for a model that must not be trained."""
        runs = self._runs
        try:
            with torch.autograd.set_detect_anomaly(False):  # rows of nothing may well have gradients that are NaN
                try:
                    finding = self._look()
                except DrewUnseen:  # once more, with every operation seeded
                    self._surroundings.restore()
                    self._give_up_own()
                    runs.seeded = True
                    finding = self._look()
        finally:
            changed = self._surroundings.restore(thorough=True)
        self._surroundings.require_parameters_kept(changed)
        return replace(finding, draws=runs.seeded or runs.drew or runs.drew_own, drops=self._drops,
                       eps=self._eps, odd=frozenset(self._odd))  # fmt: skip

    def _look(self) -> Finding:
        growth, self._probes = self._growth(), []
        base = self._probe(growth=growth) if growth.aligned else self._runs.numbered()
        losses = self._runs.losses(base, self._rows)
        self._drops, self._eps = base.drops, base.eps
        # Backwards come before the state is put back: hooks may read what this forward has left.
        sent = [self._sent(base, losses, i) for i in range(ROWS)]
        mixed = self._plain(base, losses, _MIXED)
        left = self._surroundings.left_behind()
        if not losses.requires_grad:
            raise UnsupportedModel(
                "The losses depend on no trainable parameter. Check requires_grad of the parameters, and that the loss "
                "is computed from the model's output without detach() or no_grad()."
            )
        others = [self._in_other_company(i, base, losses, left) for i in range(ROWS)]
        empty = self._among_nothing(base, losses, left)
        alone = self._alone(base, losses)
        self._collated()
        self._require_no_count(losses)
        self._at_other_draws(base)
        try:
            if not isinstance(base, Probe) or base.lost or any(o is None or o[0].lost for o in others):
                raise Obstacle("which operations run depends on the values in the batch, or on how many rows it has")
            _require_no_hooks(self._subject.parameters)
            sites = places(base, [probe for probe, *_ in others], sent, growth)
            for probe in self._probes:
                probe.place(base.calls, sites)
            self._check_arrived(base, sent, others)
            forms = self._check_credit(base, sent, mixed)
            each = self._check_credited(base, sent, others, mixed, forms)
            if empty is not None:
                self._check_among_nothing(each[ROWS // 2], *empty, base.eps)
            if alone is not None:
                i, theirs = alone
                self._refusals.require_credit_near(each[i], theirs, _one(i), 1, base.eps)
            self._whole_batch(base, losses, each, _known(base, sites))
            self._require_grown(base.eps)
        except Obstacle as obstacle:
            self._give_up_own()
            self._whole_batch(base, losses, sent, None)
            return Finding((), str(obstacle), obstacle.lasting)
        if self._moved is not None:  # by a little, and its rows are where they were
            self._refusals.refuse(*self._moved)
        return Finding([(call.op, site) for call, site in zip(base.calls, sites, strict=True)])

    def _whole_batch(self, base: Any, losses: Tensor, each: Sequence[Gradient], known: Sites | None) -> None:
        whole = WholeBatch(self._runs, self._refusals, self._batch, self._kept, (base, losses, each), known=known,
                           own=self._own, again=self._again)  # fmt: skip
        self._odd |= whole()

    def _give_up_own(self) -> None:
        if self._own is not None:
            self._own.drop()

    def _probe(self, **known: Any) -> Probe:
        self._probes.append(Probe(self._subject.parameters, ROWS, self._runs.each, **known))
        return self._probes[-1]

    def _growth(self) -> Growth:
        """Which tensors have a row for each sample."""
        few, places = self._runs.numbered(), [*range(ROWS), 0]
        more = self._runs.numbered(draws=(few.draws, places, ROWS))
        self._grown = []
        for mode, data in ((few, self._rows), (more, take(self._rows, places))):
            try:
                self._grown.append(self._runs.losses(mode, data).detach())
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception as error:
                self._blame(error)
            finally:
                self._surroundings.restore()
        if not (self._runs.drew or drop_alike(few, more)):
            raise UnsupportedModel(RATE)
        if more.unmatched or self._runs.drew or self._runs.drew_own:
            self._grown = []
        return Growth(few.ran, more.ran)

    def _require_grown(self, eps: float) -> None:
        """Among one row more each row has the loss that it has: of odd and even numbers of rows one was seen."""
        if self._grown:
            few, more = self._grown
            for k in range(ROWS):
                self._refusals.require_near(k, few, ROWS, more[k], ROWS + 1, eps, more)

    def _blame(self, error: Exception) -> None:
        """A model that fails on its own batch is not for us to judge; one that fails on fewer rows only, is."""
        self._surroundings.restore()
        with own_randomness(self._runs.seed), torch.enable_grad(), Undropped():  # watched, so that no recorder begins
            self._subject.run(self._batch)  # raises what the user would see without us
        raise UnsupportedModel(
            f"The model takes this batch but not {ROWS} rows of it ({type(error).__name__}: {error}). A loss that "
            "needs a certain number of rows is not one loss per sample. Let the forward take any number of rows."
        ) from error

    # 1, 3, 4: in other company

    @staticmethod
    def _sent(mode: Any, losses: Tensor, i: int) -> Gradient:
        """What the loss of row i sends to each operation that parameters meet."""
        if not isinstance(mode, Probe):
            return {}
        return gradient(losses, _one(i), {(*call.name_of, k): e for call in mode.calls for k, e in call.edges.items()})

    def _in_other_company(self, i: int, base: Any, ours: Tensor, left: Any) -> Any:
        """Row i with others around it: its loss, and the state afterwards, are what they were."""
        found: Any = None
        for data in around(self._rows, i, self._batch, self._features, self._rng):
            probe = self._probe(like=base) if isinstance(base, Probe) else None
            mode = probe or self._runs.numbered()
            try:
                losses = self._runs.losses(mode, data)
                sent = self._sent(mode, losses, i)
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # rows that were put together need not be such as the model takes
                self._surroundings.restore()
                continue
            if not (self._runs.drew or drop_alike(base, mode)):
                raise UnsupportedModel(RATE)
            self._settle(base, mode, data, ours, losses, i, left)
            odd = _odd_beside(losses, i)
            if found is None or not odd:
                found = mode, sent, data
            if not odd and (probe is None or (not probe.lost and len(probe.calls) == len(base.calls))):
                break  # others may run other operations, where a model asks whether a mask is all ones
        return found

    def _settle(self, base: Any, mode: Any, data: Any, ours: Tensor, losses: Tensor, i: int, left: Any) -> None:
        """Row i and the state are what they were on our rows."""
        theirs = self._surroundings.left_behind()
        if base.seeds != mode.seeds:
            raise UnsupportedModel(SEEDED)
        self._unmoved(base, mode, self._rows, data, ours, losses, i)
        self._surroundings.compare(left, theirs)

    def _unmoved(self, base: Any, mode: Any, ours: Any, theirs: Any, a: Tensor, b: Tensor, i: int) -> None:
        """Refuse a row whose loss is another in other company.

        Rounding is no reason where operations had other shapes (a model that asks whether its mask is all ones). Where
        they had not, rows may have changed places (sorted, routed): that is right if they are run sample by sample.
        """
        if same(a[i], b[i]):
            return
        eps = max(base.eps, mode.eps)
        if not near(a[i], b[i], a, eps, rounding(eps)):
            self._refusals.refuse(ours, theirs, i)
        if [op.outputs for op in base.ran] == [op.outputs for op in mode.ran]:
            self._moved = ours, theirs, i

    def _among_nothing(self, base: Any, ours: Tensor, left: Any) -> tuple[Callable[[], Gradient], Any] | None:
        """Each row with empty ones around it; what the one in the middle is credited with there, to be had once places
        are known, if the model takes them."""
        found = None
        for i in range(ROWS):
            taped = i == ROWS // 2 and isinstance(base, Probe)
            mode = self._probe(like=base) if taped else self._runs.numbered()
            data = replaced(self._rows, neutral(self._rows), [i])
            try:
                losses = self._runs.losses(mode, data)
                if isinstance(mode, Probe) and mode.lost:  # other operations, as where no mask is all ones
                    found = partial(self._runs.gradient, losses, _one(i), mode.leaves), data
                elif isinstance(mode, Probe):
                    found = partial(self._credited, mode, self._sent(mode, losses, i), i), data
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # a model need not take them
                self._surroundings.restore()
                return found
            self._settle(base, mode, data, ours, losses, i, left)
        return found

    def _check_among_nothing(self, ours: Gradient, credited: Callable[[], Gradient], data: Any, eps: float) -> None:
        """Nothing may well have no gradient, or none that is finite. Rows that are sorted may stand elsewhere there."""
        if self._alike_among_nothing(ours, credited(), eps):
            return
        losses = self._runs.losses(self._runs.numbered(), data)
        theirs = self._runs.gradient(losses, _one(ROWS // 2))
        self._surroundings.restore()
        if self._alike_among_nothing(ours, theirs, eps):
            raise Obstacle(ASTRAY)
        self._refusals.refuse_gradient(self._rows, data, ROWS // 2)

    @staticmethod
    def _alike_among_nothing(ours: Gradient, theirs: Gradient, eps: float) -> bool:
        finite = np.isfinite(size(theirs)) and np.isfinite(size(ours))
        return not theirs or not finite or apart(theirs, ours, reshaped(eps)) is None

    # 2 and 5: alone

    def _alone(self, base: Any, losses: Tensor) -> tuple[int, Gradient] | None:
        """Rows as batches of one: the rarest, and another. What the first of them sends to the parameters."""
        found: tuple[int, Gradient] | None = None
        for i in (1,) if self._again else (1, 0):
            mode = self._runs.numbered(draws=(base.draws, [i], ROWS))
            try:
                alone = self._runs.losses(mode, take(self._rows, [i]))
                theirs = {} if found else self._runs.gradient(alone, [1.0])
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # a model may need two rows (squeeze); what depends on their number shows all the same
                continue
            finally:
                drew = self._surroundings.drew()
                self._surroundings.restore()
            if drew or mode.unmatched or alone.shape != (1,):
                continue
            self._refusals.require_near(i, losses, ROWS, alone[0], 1, max(base.eps, mode.eps))
            found = found or (i, theirs)
        return found

    def _collated(self) -> None:
        """Rows as ``collate_fn`` gives them for one sample alone. It may have put them into another order."""
        left: dict[int, tuple[Alone, float]] = {}  # what no row is yet found to be like, and how far the nearest is
        for place, single in self._singles.items():
            mode = self._runs.numbered()
            try:
                losses = self._runs.losses(mode, single)
            except (UnsupportedModel, DrewUnseen):
                raise
            except Exception:  # a model may need several
                continue
            else:
                if not mode.draws:
                    sent = self._runs.gradient(losses, [1.0])
                    left[place] = Alone(single, losses[0].detach(), sent, mode.eps), np.inf
            finally:
                self._surroundings.restore()
        start = 0
        for part in (self._batch, *self._rest) if left else ():
            mode = self._runs.numbered()
            losses = self._runs.losses(mode, part)
            for place, (alone, nearest) in left.items():
                eps, sent_by = max(alone.eps, mode.eps), partial(self._runs.sent_by, losses)
                off = 0.0 if mode.draws else farness(alone, losses, place - start, eps, sent_by)
                left[place] = alone, min(off, nearest)
            left = {place: found for place, found in left.items() if found[1]}
            self._surroundings.restore()
            start += len(losses)
        for alone, nearest in left.values():
            self._refusals.refuse_collated(alone, nearest)

    # Counts and draws

    def _require_no_count(self, losses: Tensor) -> None:
        """A number that the forward itself changes must not be computed with: a compiled step would have it in it."""
        if not self._surroundings.count_ahead(0, buffers=False):
            return
        with own_randomness(self._runs.seed), torch.enable_grad(), self._runs.numbered():
            self._surroundings.count_ahead(1, buffers=False)
            later = self._subject.run(self._rows)
        self._surroundings.restore()
        if not same(losses, later):
            raise UnsupportedModel(EACH_TIME)

    def _at_other_draws(self, base: Numbered) -> None:
        """The same with other random numbers, and as many steps later as the forward itself may count."""
        runs, counts = self._runs, self._surroundings.count_ahead(0)
        if not (base.draws_freely or runs.drew or runs.drew_own or counts):
            return
        seed, runs.afresh = runs.seed, True
        seeds = [seed + 7919 * (k + 1) for k in range(EXTRA_SEEDS)] if self._again else SEEDS
        for k, runs.seed in enumerate(seeds):
            runs.ahead = 2**k if counts else 0
            i, samples = k % ROWS, count_of(self._batch)
            own, mode = Numbered(runs.seed), Numbered(runs.seed)
            ours, sent, left = self._sent_plainly(own, self._rows, i)
            data = replaced(self._rows, take(self._batch, self._rng.integers(samples, size=ROWS).tolist()), [i])
            losses, theirs, left_then = self._sent_plainly(mode, data, i)
            self._unmoved(own, mode, self._rows, data, ours, losses, i)
            self._surroundings.compare(left, left_then)
            if not _odd_beside(losses, i) and apart(sent, theirs, reshaped(max(own.eps, mode.eps))) is not None:
                self._refusals.refuse_gradient(self._rows, data, i)
        runs.seed, runs.ahead, runs.afresh = seed, 0, False

    def _sent_plainly(self, mode: Numbered, data: Any, i: int) -> tuple[Tensor, Gradient, Any]:
        """The losses of a run, what that of row i sends to the parameters, and what the run has left behind."""
        losses = self._runs.losses(mode, data)
        sent = self._runs.gradient(losses, _one(i))
        return losses, sent, self._surroundings.left_behind()

    # 3: credit

    def _plain(self, base: Any, losses: Tensor, weights: Sequence[float]) -> Gradient:
        """Autograd's gradient of a weighted sum of the losses, by way of what was taped, and past it."""
        if not isinstance(base, Probe):
            return {}
        parameters = self._subject.parameters
        targets = {("leaf", n): t for n, t in base.leaves.items()} | {("past", n): t for n, t in parameters.items()}
        return self._runs.gradient(losses, weights, targets)

    def _check_arrived(self, base: Probe, sent: Sequence[Gradient], others: Sequence[Any]) -> None:
        """In other company the loss of a row sends the same gradients to the same places."""
        for i, (probe, theirs, _) in enumerate(others):
            if any(key in theirs and theirs[key].shape != g.shape for key, g in sent[i].items()):
                raise Obstacle("shapes depend on the values in the batch")
            if apart(sent[i], theirs, _rounding(base, probe)) is not None:
                raise UnsupportedModel(BACKWARD)

    def _check_credit(self, base: Probe, sent: Sequence[Gradient], mixed: Gradient) -> Forms:
        """The tape's gradients, which are autograd's, of a mixture of all rows: were rows credited to other samples,
        the mixture would be another one."""
        past = next((name for way, name in mixed if way == "past"), None)
        if past is not None:
            raise Obstacle(
                f"parameter {past!r} is used where its operations cannot be seen (a compiled or scripted part, a "
                "custom autograd function)"
            )
        forms = _forms(base, added(sent))
        theirs = {name: g for (_, name), g in mixed.items()}
        if not np.isfinite(size(theirs)):
            return forms
        if (name := apart(self._runs.weighted(forms, _MIXED), theirs, _exactness(base))) is not None:
            raise Obstacle(f"what is credited to a row is not its gradient at parameter {name!r}")
        return forms

    def _check_credited(
        self, base: Probe, sent: Sequence[Gradient], others: Sequence[Any], mixed: Gradient, credit: Forms
    ) -> list[Gradient]:
        """In other company a row is credited with the same gradient; that of each row.

        What arrives may be the same where this is not: a layer of zeros sends nothing back, and its own gradient is
        made of its input.
        """
        each = []
        finite = all(np.isfinite(size(one)) for one in sent)  # what is not may lie in the rows of others, too
        for i, (probe, theirs, data) in enumerate(others):
            own = torch.tensor([i], device=base.device)
            forms = among(credit, range(ROWS), [i]) if finite else _forms(base, sent[i], own)
            ours = self._runs.weighted(forms, [1.0])
            if i == ROWS // 2:
                self._check_norm(base, forms, mixed)
            if apart(ours, self._credited(probe, theirs, i), _rounding(base, probe)) is not None:
                self._refusals.refuse_gradient(self._rows, data, i)
            each.append(ours)
        return each

    def _credited(self, probe: Probe, sent: Gradient, i: int) -> Gradient:
        """What row i is credited with, of what its loss sends."""
        return self._runs.weighted(_forms(probe, sent, torch.tensor([i], device=probe.device)), [1.0])

    def _check_norm(self, base: Probe, forms: Forms, mixed: Gradient) -> None:
        """The norm that is credited to a row is that of the gradient that is."""
        if not forms:
            return
        with exactly(base.device):
            norm = float(torch.stack([form.norm2() for form in forms.values()]).sum(0).sqrt())
            whole = size({n: form.weighted(torch.ones(1, device=base.device)) for n, form in forms.items()})
        # A norm counts in what underflow can take from it, so that of a gradient of nothing is not quite nothing.
        if np.isfinite(whole) and abs(norm - whole) > relative(_exactness(base)) * whole + 1e-9 * size(mixed) + 1e-17:
            raise Obstacle("the norm that is credited to a row is not that of its gradient")


def _odd_beside(losses: Tensor, i: int) -> bool:
    """Whether row i has a loss that is finite, beside one that is not. 0 times what is not finite is not 0: in the
    gradient of the one there is then NaN of the other."""
    return bool(torch.isfinite(losses[i])) and bool(odd_among(losses))


def _one(i: int) -> list[float]:
    """Weights of our rows: row i alone."""
    return [float(k == i) for k in range(ROWS)]


def _known(base: Probe, sites: Sequence[Site]) -> Sites:
    known = Sites()
    for call, site in zip(base.calls, sites, strict=True):
        known.add(call.op, site)
    return known


def _exactness(base: Probe) -> float:
    """By how much of itself a gradient may be off that is computed in two ways."""
    return max(1e-9, float(base.eps**0.5))


def _rounding(base: Probe, probe: Probe) -> float:
    """By how much of itself a gradient may be off in another run of as many rows."""
    alike = base.device.type == "cpu" and [op.outputs for op in base.ran] == [op.outputs for op in probe.ran]
    return 1e-4 if alike else probe.eps**0.5


def _forms(probe: Probe, sent: Gradient, rows: Tensor | None = None) -> Forms:
    """The per-sample gradients of what some losses have sent; of some rows alone."""
    keys = [(*call.name_of, k) for call in probe.calls for k in call.edges]
    try:
        with exactly(probe.device):
            return gradients([probe], [[sent.get(key) for key in keys]], rows)
    except UnsupportedModel as error:
        raise Obstacle(str(error)) from error
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        raise Obstacle(ALONE.format(error)) from error


def _require_no_hooks(parameters: Mapping[str, Tensor]) -> None:
    """A hook on a parameter sees its gradient, which a tape never makes."""
    for name, p in parameters.items():
        if has_hooks(p):
            raise Obstacle(f"parameter {name!r} has a hook (register_hook), which needs its gradient as a whole")


def around(rows: Any, i: int, batch: Any, features: Features | None, rng: np.random.Generator) -> Iterator[Any]:
    """The rows with others in the place of all but row i: a few ways, should a model not take one.

    First for the row in the middle, the rarest: among copies of itself, which shows what counts rows that are alike;
    for the first: among others of the batch; for the last: among copies of an extreme one.
    """
    samples, first = count_of(batch), (1, 0, 2)[i]

    def copies() -> Iterator[Any]:
        yield take(rows, [i] * ROWS)

    def others() -> Iterator[Any]:
        yield replaced(rows, take(batch, rng.integers(samples, size=ROWS).tolist()), [i])

    def extremes() -> Iterator[Any]:
        for extreme in extreme_rows(samples, features, rng):
            yield replaced(rows, take(batch, [extreme] * ROWS), [i])

    ways = copies, others, extremes
    for way in (*ways[first:], *ways[:first]):
        yield from way()
