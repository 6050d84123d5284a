"""Per-sample gradient norms and their weighted sum, in one forward and one backward.

An engine belongs to one model. It owns everything that is remembered about it: where the samples are in its operations,
when it was looked at, what was compiled.
"""

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpscale.checks import out_of_memory
from dpscale.engine.arguments import (
    LossFn,
    Points,
    batch_size,
    check_loss_fn,
    check_losses,
    check_mask,
    check_points,
    require_finite,
    require_real,
    tensors_in,
    trainable,
)
from dpscale.engine.by_sample import sum_by_sample
from dpscale.engine.combine import Evaluated, combine, evaluate, exactly, gradients
from dpscale.engine.compat import reparametrized, version
from dpscale.engine.compile.inductor import inductor
from dpscale.engine.compile.step import Backend, CompiledSum, Meanwhile
from dpscale.engine.compile.worth import Worth
from dpscale.engine.errors import PassedBy
from dpscale.engine.identity import Setting, code_of
from dpscale.engine.modules import Counts, Structure, Writes, structure
from dpscale.engine.phases import cold_start, phase, waiting
from dpscale.engine.recorder import Recorder
from dpscale.engine.result import ScaledSum
from dpscale.engine.rules.forms import Dense
from dpscale.engine.tape.tape import Sites, UnknownOperation
from dpscale.engine.verify.glance import Glance
from dpscale.engine.verify.look import Finding, Look
from dpscale.engine.verify.own import OwnRun
from dpscale.engine.verify.places import ROWS
from dpscale.engine.verify.rows import Features, anew, choose, copied, count_of, features, replaced, take
from dpscale.engine.verify.runs import Subject
from dpscale.engine.verify.schedule import Due, Schedule
from dpscale.scaling import Scaling

log = logging.getLogger("dpscale")

_LOOK = Due(thorough=True)

_LEARNT = (1 << 25) - (1 << 13)
"""Bytes: about the largest block that GNU's C library learns from."""

Remember = Callable[[dict[str, Tensor], slice], Mapping[str, Tensor]]
"""Per-sample vectors in place of the gradients (rows, *shape) of those rows of the batch."""


@dataclass(frozen=True)
class Looked:
    """That a kind of model and loss was looked at: with how many different rows; and what it is like."""

    rows: int
    draws: bool
    drops: bool
    eps: float


class Trusted(NamedTuple):
    """A model that may be trained.

    Attributes:
        kind: of model and loss, by which what was found is remembered.
        setting: how it is set.
        evaluated: the forward and backward of the batch, if a check has taken them for one of its runs.
    """

    kind: Any
    setting: Setting
    evaluated: Evaluated | None = None


@cache
def _keep_freed_memory() -> None:
    """Once a block of this size was freed, GNU's C library keeps up to 64 MiB of what is freed instead of giving it
    back: else every step on the CPU fetches its memory from the system anew, which takes a quarter of a small CNN's."""
    torch.empty(_LEARNT, dtype=torch.uint8, device="cpu")


class Engine:
    """Weighted sums of one model's per-sample gradients.

    Args:
        model: any module that treats samples apart. It is not kept alive.
        compile: trace and compile the step at its first batch; or what compiles the traced graph; or what decides in
            the course of the run whether to.
        any_size: compile it once for batches of any size, if that can be done, by the example of so many rows. 0: for
            each size.
        most: about the most rows that come.
    """

    def __init__(
        self, model: nn.Module, *, compile: bool | Backend | Worth = False, any_size: int = 0, most: int = 0
    ) -> None:
        _keep_freed_memory()
        self._model = weakref.ref(model)
        self._sites = Sites()
        self._schedule, self.writes = Schedule(), Writes()
        self._looked: dict[Any, Looked] = {}
        self._obstacles: dict[Any, Finding] = {}  # where rows cannot be attributed, by the kind of model and loss
        self._writes_data = False  # whether a forward has written into what it was given
        self.counts = Counts(model)  # before the first forward of the last draw
        self._changes = False  # whether a batch met operations that a look had not, though it looked once more
        self._worth = compile if isinstance(compile, Worth) else None
        backend = inductor if compile is True or isinstance(compile, Worth) else compile
        self._compiled = CompiledSum(model, backend, any_size, most) if backend else None
        self.recorder = Recorder(self)

    @property
    def model(self) -> nn.Module:
        """Whose gradients are summed."""
        model = self._model()
        assert model is not None, "an engine is used after its model is gone"
        return model

    @property
    def compiles(self) -> bool:
        """Whether sums are compiled now, where they can be."""
        return self._compiled is not None if self._worth is None else self._worth.compile

    def put(self, tensors: Sequence[Tensor], count: int, rows: int) -> list[Tensor] | None:
        """Put ``count`` rows where the last compiled step reads ``rows`` on CUDA, with zeros after them, if they fit:
        then they need not be copied again."""
        return None if self._compiled is None else self._compiled.put(tensors, count, rows)

    @property
    def sites(self) -> Sites:
        """Where the samples are in each operation that parameters meet."""
        return self._sites

    def checks(self) -> dict[str, Any]:
        """What was looked at so far, for a reviewer."""
        return {
            "times that the model was checked": self._schedule.looks,
            "kinds of model and loss that passed": len(self._looked),
            "runs sample by sample": "yes" if self._obstacles or self._changes else "no",
        }

    def obstacle(self, kind: Any) -> str | None:
        """Why the rows of such a model and loss cannot be attributed to samples, if they cannot."""
        found = self._obstacles.get(kind)
        return None if found is None else found.obstacle

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The sums of one step, from whose time it is decided whether to compile."""
        begin = time.perf_counter()
        yield
        if self._worth is not None:
            self._worth.took(time.perf_counter() - begin)

    def scaled_sum(
        self, loss_fn: LossFn, batch: Any, rule: Scaling, mask: Tensor | None = None, points: Points | None = None, *,
        keep: bool = False, change: Remember | None = None, singles: Mapping[int, Any] | None = None,
        rest: Sequence[Any] = (), rows: Features | None = None, found: Structure | None = None,
        meanwhile: Meanwhile | None = None, counts: Counts | None = None,
    ) -> ScaledSum:  # fmt: skip
        """As `dpscale.scaled_sum`.

        Args:
            keep: copy the gradients. Without it they may be buffers that the next call overwrites.
            change: what to scale in place of the per-sample gradients, of which B are then held.
            singles: rows that were collated alone, by their place.
            rest: other parts of the batch that these were collated with.
            rows: features of the rows, if they are known.
            found: the structure of the model as it is now, if that is known.
            meanwhile: may be called while a GPU is at work, with the gradients that it works on.
            counts: of the model, before the first part of a draw. None: this is the first.
        """
        model, found = self.model, structure(self.model) if found is None else found
        parameters = trainable(found)
        samples, device = batch_size(batch)
        mask = check_mask("scaled_sum", mask, samples, device)
        points = check_points(points, parameters)
        if samples == 0:
            dtype = torch.promote_types(next(iter(parameters.values())).dtype, torch.float32)
            return combine({}, rule, mask, parameters, torch.zeros(0, dtype=dtype, device=device))

        def run(data: Any) -> Tensor:
            versions = _versions(data)
            losses = check_losses(loss_fn(model, data), batch_size(data)[0])
            self._writes_data |= _versions(data) != versions
            return losses

        def run_apart(data: Any) -> Tensor:  # looks copy what they run on
            return run(copied(data) if self._writes_data else anew(data))

        def run_again(data: Any) -> Tensor:
            self.counts.restore()
            return run_apart(data)

        subject = Subject(model, parameters, run, loss_fn)
        looks = self._schedule.looks
        # Of a first sum, one line in the log for all that comes before it.
        with self.writes.own(found), nullcontext() if looks else cold_start():
            compiled = self._compiled if self.compiles and change is None else None
            shares = compiled is None and points is None
            kind, setting, evaluated = self.trust(
                subject, found, batch, mask, rows, singles, rest, points, shares=shares
            )
            checked = self._schedule.looks > looks  # somebody has waited for that, and waits on
            self.counts = Counts(model) if counts is None else counts
            versions = _versions(batch)
            for again in (True, False):
                if kind in self._obstacles:
                    break
                try:
                    if compiled is not None:
                        out = compiled(
                            setting, run_apart, batch, rule, mask, points, self._sites, keep=keep, meanwhile=meanwhile,
                            begin=self.counts.restore,
                        )  # fmt: skip
                        if out is not None:
                            return out
                        _require_unwritten(batch, versions)
                    counting = points and [(c, w) for c, w in points if c != 0]
                    with waiting("computing", on=True) if checked else nullcontext():
                        evaluated = evaluated or evaluate(parameters, run_again, batch, self._sites, mask, counting)
                        return self._weighed(parameters, evaluated, rule, mask, change)
                except (UnknownOperation, PassedBy):
                    evaluated = None
                    _require_unwritten(batch, versions)
                    if again:
                        self.look(subject, batch, mask, kind, rows)
        if kind not in self._obstacles:
            self._note_change()
        return sum_by_sample(model, parameters, run_again, batch, rule, mask, points, change)

    def trust(
        self, subject: Subject, found: Structure, batch: Any, mask: Tensor, rows: Features | None = None,
        singles: Mapping[int, Any] | None = None, rest: Sequence[Any] = (), points: Points | None = None, *,
        shares: bool = False,
    ) -> Trusted:  # fmt: skip
        """Look at the model if a look is due; refuse it if it must not be trained.

        Args:
            points: where gradients are taken, if not at the model as it is: it is looked at there, too.
            shares: whether the caller computes the sum of the batch next, taped and at the model as it is: then the
                forward and backward of that may serve as a run of the check.
        """
        setting = Setting.of(found, subject.loss_fn, batch)
        kind = code_of(subject.loss_fn), found.made
        told = setting.holding, setting.kind, found.attributes.settings, found.number, self.writes.count(found)
        rows = features(batch, wait=True) if rows is None else rows
        due = self._schedule.due(kind, told, setting.shapes, len(mask), rows)
        if due is None:
            return Trusted(kind, setting)
        evaluated = self.look(subject, batch, mask, kind, rows, due, singles, rest, shares=shares)
        for coefficient, values in points or ():
            if values is not None and coefficient != 0:
                self.look(_at(subject, values), batch, mask, kind, rows, due, singles, rest)
        self.writes.note_zeros(subject.parameters)  # of the model: a point stays as it is
        setting = Setting.of(structure(subject.model), subject.loss_fn, batch)  # as those forwards have left it
        return Trusted(kind, setting, evaluated)

    def look(
        self, subject: Subject, batch: Any, mask: Tensor, kind: Any, rows: Features | None = None,
        due: Due = _LOOK, singles: Mapping[int, Any] | None = None, rest: Sequence[Any] = (), *, shares: bool = False,
    ) -> Evaluated | None:  # fmt: skip
        """Look at some rows of a batch, and remember what was found. A glance will do if it shows nothing strange."""
        available = np.flatnonzero(mask.cpu().numpy())
        if not len(available):
            self._schedule.forget()
            return None
        number = self._schedule.looks
        start, seed = time.perf_counter(), 1_000_003 * number
        if not number:
            require_finite(subject.model)
        require_real(subject.parameters)
        own = OwnRun(subject, batch, mask) if shares else None
        judge = partial(self._judge, subject, rows, kind=kind, due=due, seed=seed)
        chance = np.random.default_rng(number)
        try:
            with waiting("checking") if number else phase("checking"):  # later ones are short, as a rule
                kept = choose(rows, available, [i for i in due.first if mask[i]], ROWS, chance)
                odd = judge(kept, batch, singles=singles, rest=rest, own=own)
                available = np.setdiff1d(available, [*odd])
                if odd and len(available):  # such rows show what meets them; of others nothing can be seen beside them
                    judge(choose(rows, available, [], ROWS, chance), _without(batch, available))
                if own is not None and kind in self._obstacles:
                    own.drop()
        except BaseException:  # whatever ended it: what was not looked at to the end is not known
            self._schedule.forget()
            if own is not None:
                own.drop()
            raise
        self._schedule.looked(time.perf_counter() - start - (own.seconds if own else 0.0))
        return own.evaluated if own else None

    def _judge(
        self, subject: Subject, rows: Features | None, kept: Sequence[int], batch: Any, *, kind: Any, due: Due,
        seed: int, singles: Mapping[int, Any] | None = None, rest: Sequence[Any] = (), own: OwnRun | None = None,
    ) -> Collection[int]:  # fmt: skip
        """Judge by these rows: at a glance, if that will do. The rows that are found odd: nothing of them is finite."""
        known = self._looked.get(kind)
        if not due.thorough and known is not None and known.rows >= len({*kept}):
            glance = Glance(
                subject, batch, kept, sites=None if kind in self._obstacles else self._sites, seed=seed,
                draws=known.draws, drops=known.drops, eps=known.eps, own=own,
            )  # fmt: skip
            if glance(singles or {}, rest):
                return glance.odd
        look = Look(subject, batch, rows, kept, singles=singles, rest=rest, again=known is not None, seed=seed,
                    own=own)  # fmt: skip
        finding = look()
        self._learn(kind, finding, len({*kept}))
        return finding.odd

    def _learn(self, kind: Any, finding: Finding, rows: int) -> None:
        self._looked[kind] = Looked(rows, finding.draws, finding.drops, finding.eps)
        for op, site in finding.sites:
            self._sites.add(op, site)
        self._note_obstacle(kind, finding)

    def _note_obstacle(self, kind: Any, finding: Finding) -> None:
        known = self._obstacles.get(kind)
        if finding.obstacle is None:
            if known is not None and not known.lasting:
                del self._obstacles[kind]
        elif known is None or not known.lasting:
            self._obstacles[kind] = finding
            if known is None:
                log.warning(
                    "dpscale: runs sample by sample, which is exact and slow: %s. To make it fast, keep each sample in "
                    "rows of its own and run the same operations for every batch.", finding.obstacle,
                )  # fmt: skip

    def _note_change(self) -> None:
        """Of a model whose operations are others at every run."""
        if not self._changes:
            log.warning(
                "dpscale: a batch runs sample by sample, which is exact and slow: its operations are not those that "
                "the model had a moment ago. To make it fast, run the same operations for every batch."
            )
        self._changes = True

    def _weighed(
        self, parameters: Mapping[str, Tensor], evaluated: Evaluated, rule: Scaling, mask: Tensor,
        change: Remember | None,
    ) -> ScaledSum:  # fmt: skip
        tapes, grads, losses = evaluated
        with exactly(mask.device):
            try:
                forms = gradients(tapes, grads)
            except (RuntimeError, ValueError, IndexError) as error:  # rows elsewhere than in the batches before
                if out_of_memory(error):
                    raise
                raise UnknownOperation from error
            if change is not None:
                whole = {
                    n: forms[n].per_sample() if n in forms else p.new_zeros(len(mask), *p.shape)
                    for n, p in parameters.items()
                }
                forms = {n: Dense(g) for n, g in change(whole, slice(0, len(mask))).items()}
            return combine(forms, rule, mask, parameters, losses)


def _without(batch: Any, available: NDArray[np.int64]) -> Any:
    """A batch in which copies of an available row are in the place of those that are not."""
    return replaced(batch, take(batch, [int(available[0])] * count_of(batch)), available.tolist())


def _at(subject: Subject, values: Mapping[str, Tensor]) -> Subject:
    """The model with other values for its parameters."""
    leaves = {n: values[n].detach().requires_grad_() for n in subject.parameters}

    def run(data: Any) -> Tensor:
        with reparametrized(subject.model, leaves):
            return subject.run(data)

    return Subject(subject.model, leaves, run, subject.loss_fn)


def _versions(batch: Any) -> list[int]:
    return [version(t) for t in tensors_in(batch) if not t.is_inference()]


def _require_unwritten(batch: Any, versions: list[int]) -> None:
    """A batch that is run once more must be as it was drawn."""
    if _versions(batch) != versions:
        raise RuntimeError(
            "The forward has written into its batch, which it had not done before, and the batch is needed as it was "
            "drawn. Nothing was released. Let the forward write into a copy: x = x.clone()."
        )


_engines: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()


def engine_of(model: nn.Module) -> Engine:
    """The engine that calls of `scaled_sum` on one model share."""
    if model not in _engines:
        _engines[model] = Engine(model)
    return _engines[model]


def scaled_sum(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    rule: Scaling,
    mask: Tensor | None = None,
    points: Points | None = None,
) -> ScaledSum:
    """Σ_i w(‖g_i‖)·g_i over the samples of a batch, by one forward and one backward.

    Guarantee: for a model and loss that treat samples apart (checked on the first call and every so often after), every
    sample adds at most ``rule.bound`` to the sum, in norm over all trainable parameters.

    | sample                  | adds                                        |
    |-------------------------|---------------------------------------------|
    | masked                  | exactly nothing                             |
    | gradient inf or NaN     | exactly nothing, and is counted in ignored  |
    | no sample at all (B=0)  | the sum is zero                             |

    Args:
        model: any module; parameters with ``requires_grad`` are trained, others are constants.
        loss_fn: ``loss_fn(model, batch)`` -> per-sample losses, shape (B,); no mean, no sum.
        batch: any pytree of tensors with the batch as their first dimension.
        rule: from norm to weight.
        mask: (B,) bool; False leaves the sample out.
        points: ``[(coefficient, {name: tensor}), ...]``; the gradient of a sample is then
            Σ coefficient · ∇loss at those weights, and the norm is that of the combination. None: the model as it is.

    Example:
        >>> import torch; from torch import nn; import torch.nn.functional as F; from dpscale import Clip, scaled_sum
        >>> model, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        >>> out = scaled_sum(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), (x, y), Clip(C=0.1))
        >>> out.grads["weight"].shape, bool((out.norms * out.weights).max() <= 0.1 + 1e-6)
        (torch.Size([2, 3]), True)
    """
    check_loss_fn("scaled_sum", loss_fn)
    return engine_of(model).scaled_sum(loss_fn, batch, rule, mask, points)
