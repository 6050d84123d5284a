"""Saver: writes down all that a private run needs to go on, and goes on from it if it fits."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dpscale import checkpoint
from dpscale.distributed import Ranks, leaves_told
from dpscale.engine.compat import tree_map
from dpscale.engine.recorder import Recorder
from dpscale.noise import Key, noise_from
from dpscale.plan import Plan
from dpscale.run import RunState, refusals

_SAVED = {"run", "model", "optimizer", "optimizer_type", "extra", "about"}
"""What a checkpoint has."""


@dataclass(frozen=True)
class Saver:
    """Saves and loads one run.

    Attributes:
        parameters: gives the trainable ones.
    """

    model: nn.Module
    optimizer: Optimizer
    state: RunState
    ranks: Ranks
    recorder: Recorder
    parameters: Callable[[], Mapping[str, Tensor]]

    def state_dict(self) -> dict[str, Any]:
        """Of the run alone, with copies of tensors."""
        with self.state.turn:
            if self.state.momentum is not None and (self.ranks.sharded or self.state.per_sample):
                self.ranks.meet("state_dict")
            return {name: tree_map(_copied, value) for name, value in self._run().items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        with self.ranks.together("load_state_dict", lambda: {"state": leaves_told(saved)}):
            self._check(saved, "The state")
        with self.ranks.together("load_state_dict", dict):
            self._resume(saved)
        self.adopt()

    def save(self, path: Path, extra: Any, about: Mapping[str, Any]) -> None:
        """Write run, model and optimizer into one file."""
        self.ranks.meet("save")
        with self.state.turn, self.ranks.together("save", lambda: {"steps taken": self.state.steps_taken}):
            found = {
                "run": self._run(), "model": self.ranks.gathered(self.model.state_dict()),
                "optimizer": self.ranks.gathered(self.optimizer.state_dict()),
                "optimizer_type": type(self.optimizer).__name__, "extra": extra, "about": about,
            }  # fmt: skip
            if self.ranks.rank == 0:
                checkpoint.write(path, found)
            if self.state.booking is not None:
                self.state.booking.confirm()

    def load(self, path: Path) -> Any:
        """Go on from such a file, or change nothing; what it has as ``extra``."""
        with self.ranks.together("load", lambda: {"state": leaves_told(found)}):
            found = checkpoint.read(path)
            if not isinstance(found, dict) or found.keys() != _SAVED:
                raise ValueError(f"{path} is damaged, or no checkpoint of a private run. Nothing was changed.")
            self._check(found["run"], f"The checkpoint {path}", found["model"])
            kind = type(self.optimizer).__name__
            if found["optimizer_type"] != kind:
                raise ValueError(
                    f"The checkpoint {path} does not fit this run: its optimizer is {found['optimizer_type']}, and "
                    f"this one is {kind}. Nothing was changed."
                )
        with self.ranks.together("load", dict):
            before = self.optimizer.state_dict()
            self.optimizer.load_state_dict(self._divided(found["optimizer"]))  # refuses other groups of parameters
            try:
                self._resume(found["run"])
            except BaseException:
                self.optimizer.load_state_dict(before)
                raise
            now = self.model.state_dict()
            self.model.load_state_dict({n: self.ranks.divided(t, now[n]) for n, t in found["model"].items()})
        self.adopt()
        return found["extra"]

    def adopt(self) -> None:
        """Take over what rank 0 knows of the ledger, and a fresh key: runs that are resumed, or composed in a ledger,
        must not share noise, whatever their seeds."""
        state = self.state
        if state.booking is not None:
            state.name, state.lost = state.booking.name, state.booking.lost
        state.name, state.lost = self.ranks.told((state.name, state.lost))
        state.noise = noise_from(state.noise.source, self.ranks.key(None))

    def _run(self) -> dict[str, Any]:
        parameters = self.parameters()
        found = self.state.saved(parameters)
        if self.state.momentum is not None:
            found["momentum"] = self.ranks.joined(found["momentum"], parameters, self.state.plan.sampling.size)
        return found

    def _divided(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer, in shards where its parameters are."""
        if not self.ranks.sharded:
            return saved
        steered = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            k: {n: self.ranks.divided(v, steered[k]) for n, v in each.items()} if k < len(steered) else each
            for k, each in saved["state"].items()
        }
        return {**saved, "state": state}

    def _check(self, saved: Mapping[str, Any], what: str, model: Mapping[str, Any] | None = None) -> None:
        """Refuse a state that is not of this run, or a run that it would undo."""
        if self.state.released_here:
            raise RuntimeError(
                f"This run has released {self.state.released_here} steps since it was made, which it would forget. "
                "Nothing was changed. Load into a new one, from privatize(). To go back to earlier weights, load them "
                "into the model: the steps stay paid for."
            )
        against = [*refusals(saved, self._plan_for(saved), self.parameters(), self.state.name)]
        if model is not None and not against:
            against = [*_differences(model, self.model.state_dict())]
        if against:
            raise ValueError(f"{what} does not fit this run: {'; '.join(against)}. Nothing was changed.")

    def _resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from a state that was checked; `adopt` must follow."""
        with self.state.lock:
            self.state.restore(saved, self._plan_for(saved), noise_from(self.state.noise.source, Key()))
            self.recorder.stop()

    def _plan_for(self, saved: Any) -> Plan:
        """This run's plan; where it does not say that samples are people, as a state has it."""
        plan = saved.get("plan") if isinstance(saved, Mapping) else None
        records = plan.get("records") if isinstance(plan, Mapping) else None
        own = self.state.plan
        silent = own.records is None and self.state.name is None
        return replace(own, records=records) if silent and isinstance(records, int) else own


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two state dicts of a model: names, shapes and types of tensors."""
    for name in dict.fromkeys([*before, *now]):
        one, other = ((state[name].shape, state[name].dtype) if isinstance(state.get(name), Tensor) else name in state
                      for state in (before, now))  # fmt: skip
        if one != other:
            yield f"{name} of its model is another, or is missing"
