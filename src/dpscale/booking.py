"""Booking: the part of one run in a ledger. Its process holds a lock, and reserves steps before they are released.

The lock ends with the process, however that ends, and knows of no clock.
"""

import atexit
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpscale import ledger as ledgers
from dpscale.checks import require
from dpscale.files import is_unicode, try_lock
from dpscale.ledger import BudgetExhausted, Ledger, LedgerError, now
from dpscale.plan import Plan
from dpscale.sampling import SAMPLERS

if TYPE_CHECKING:
    from dpscale.selection import Selection

log = logging.getLogger("dpscale")


def open_run(ledger: Ledger, name: str | None, plan: Plan, selection: "Selection | None" = None) -> "Booking":
    """Take a run of that name, new or to be resumed, if the whole plan fits into what is left. None: a new name.

    With a ``selection`` the run is the best of a random number of such runs.
    """
    _settle_later()
    name = f"run-{now()[:10]}-{secrets.token_hex(4)}" if name is None else name
    require(isinstance(name, str) and 0 < len(name) <= 200, "privatize", "run", "a name of 1 to 200 characters", name)
    action = "Half of a character cannot be written down."
    require(is_unicode(name), "privatize", "run", "a name of whole characters", name, action)
    known, action = type(plan.sampling) in SAMPLERS.values(), "The price of others is not known."
    require(known, "privatize", "plan", "with a sampler of dpscale, to be booked", plan.sampling, action)
    plain = plan.to_dict() | ({} if selection is None else {"selection": selection.to_dict()})
    lock, owner = _take(ledger, name), secrets.token_hex(8)
    try:
        for _ in range(100):
            with ledger.reading() as db:
                admissions = _admissions(db)
                runs = ledger.rows(db, own=name)
            ledger.require_fitting(name, plain, runs)  # takes a while, in which others may write
            with ledger.writing() as db:
                if _admissions(db) == admissions:  # nobody else was admitted meanwhile
                    crashed = _admit(ledger, db, name, plain, owner)
                    # Those that do not count with their whole plans must be admitted anew before they go on.
                    ended = [(run.name,) for run in runs if not run.live and run.name != name]
                    db.executemany("UPDATE runs SET owner = NULL WHERE name = ?", ended)
                    break
        else:
            raise LedgerError(f"{ledger} is too busy: other runs were admitted all the time. Try again.")
        if crashed:
            told = "dpscale: the run %r of %s ended without a word, after it had reserved %d steps. They are charged."
            log.warning(told, name, ledger.path, crashed)
        return Booking(ledger, name, plan, owner, lock)
    except BaseException:
        os.close(lock)
        raise


@dataclass(eq=False)
class _Held:
    """What a process has of a run: the part of a `Booking` that outlives it, to be given back.

    Attributes:
        owner: a token of the process, as in the ledger.
        lock: an open file; None when the run was given back.
        position: the last step that was announced for release.
        stretch: id of the row that steps are booked in, if there is one.
        last: the last step that is reserved.
    """

    ledger: Ledger
    owner: str
    lock: int | None
    process: int
    position: int = 0
    stretch: int | None = None
    last: int = -1
    turn: threading.RLock = field(default_factory=threading.RLock)  # a thread may save while another one steps

    @property
    def mine(self) -> bool:
        """Whether this process has it still."""
        return self.lock is not None and self.process == os.getpid()


class Booking:
    """A run that this process has, in a ledger.

    A stretch of steps is as long as keeps the writing below half a percent of the time, and a twentieth of the plan at
    most.

    Attributes:
        lost: steps that are charged, and that the run has to take again, as it went back to a checkpoint or to the
            start.
        crashed: steps that processes had reserved when they ended without a word.
    """

    def __init__(self, ledger: Ledger, name: str, plan: Plan, owner: str, lock: int) -> None:
        assert plan.steps is not None
        self.ledger, self.name = ledger, name
        self._steps, self._longest = plan.steps, max(1, plan.steps // 20)
        self._length, self._since = max(1, plan.steps // 1000), time.monotonic()
        self._row = next(run for run in ledger.runs() if run.name == name)
        self.lost = self._row.lost_from(0)
        self.crashed = sum(s.last - s.first for s in self._row.crashed)
        self._held = _Held(ledger=ledger, owner=owner, lock=lock, process=os.getpid())
        _holders.add(self._held)
        self._end = weakref.finalize(self, _give_back, self._held)

    def resume(self, position: int, lost: int) -> int:
        """The run goes on after step ``position``, from a checkpoint that knew of ``lost`` steps; how many are lost."""
        booked = self._row.lost_from(position)
        self.lost = max(booked, lost)
        if position > self._row.position or lost > booked:  # it took steps that were not booked here
            self._insert(position, position, "confirmed")
        return self.lost

    def reserve(self, step: int) -> None:
        """See that step ``step`` is on the disk before it is released."""
        held = self._held
        with held.turn:
            if not held.mine:
                raise RuntimeError(
                    f"The run {self.name!r} was closed, or belongs to another process, so that its steps are not "
                    "booked. Nothing was released. Call privatize() anew, and load its checkpoint."
                )
            if held.stretch is None or step > held.last:
                _settle_later()
                self._extend(step)
            held.position = step

    @property
    def begun(self) -> bool:
        """Whether anything was booked before this process took the run."""
        return self._row.position > 0

    def reserve_whole(self) -> None:
        """See that the whole plan is on the disk: a selection is paid for as a whole, and once."""
        with self._held.turn:
            self.lost = 0
            if not self.begun:
                self._held.stretch, self._held.last = self._insert(0, self._steps, "reserved"), self._steps
            self._held.position = self._steps

    def confirm_whole(self) -> None:
        """Say that a selection has come to its end; if a process of it was killed, that stays to be seen."""
        if self._held.stretch is None:
            self._insert(self._steps, self._steps, "confirmed")
        self.confirm()

    def _extend(self, step: int) -> None:
        """Reserve a stretch that begins with ``step``."""
        last, begin = min(step - 1 + self._length, self._steps - self.lost), time.monotonic()
        if last < step:
            raise BudgetExhausted(
                f"The run {self.name!r} of {self.ledger.path} has used up its {self._steps} planned steps, {self.lost} "
                "of them before it was resumed or begun anew. Nothing was released. Load its last checkpoint, or give "
                "a new run another name."
            )
        self._held.stretch, self._held.last = self._insert(step - 1, last, "reserved"), last
        end = time.monotonic()
        if end - begin > 0.005 * (end - self._since):
            self._length = min(2 * self._length, self._longest)
        self._since = end

    def _insert(self, first: int, last: int, state: str) -> int:
        """Write a stretch; the one before it was used to its end."""
        with self.ledger.writing() as db:
            number = db.execute("SELECT id FROM runs WHERE owner = ?", (self._held.owner,)).fetchone()
            if number is None:
                raise LedgerError(
                    f"Another process has taken the run {self.name!r}, or took it for ended, as its lock was gone. "
                    "Nothing was released. Call privatize() anew, and load its checkpoint."
                )
            with self.ledger.changing(db, *number):
                told = "UPDATE stretches SET state = 'confirmed' WHERE id = ? AND run = ?"
                db.execute(told, (self._held.stretch, *number))
                row = db.execute(
                    "INSERT INTO stretches (run, first, last, lost, state, begun) VALUES (?, ?, ?, ?, ?, ?)",
                    (*number, first, last, self.lost, state, now()),
                ).lastrowid
        assert row is not None
        return row

    def confirm(self) -> None:
        """Give back what is reserved and not used, after a checkpoint or at the end."""
        _confirm(self._held)

    def close(self) -> None:
        """Give back the run too: another process may take it."""
        self._end()


def _take(ledger: Ledger, name: str) -> int:
    """The lock of a run."""
    path = ledger.lock_file(name)
    try:
        path.parent.mkdir(exist_ok=True)
        for _ in range(20):  # somebody may only be looking whether the run is live
            if (lock := try_lock(path)) is not None:
                return lock
            time.sleep(0.02)
    except OSError as error:
        raise LedgerError(f"Cannot lock the run {name!r} of {ledger.path}: {error}. Nothing was released.") from error
    raise RuntimeError(
        f"The run {name!r} of {ledger.path} is going on, in this or another process. Two at once would each release "
        "what only one of them books. End the other one, call close() on it, or give this run another name."
    )


def _admissions(db: sqlite3.Connection) -> object:
    return db.execute("SELECT admissions FROM total").fetchone()


def _admit(ledger: Ledger, db: sqlite3.Connection, name: str, plan: Mapping[str, Any], owner: str) -> int:
    """Make the run this process's. What another has reserved and not confirmed stays charged; how many steps."""
    db.execute("UPDATE total SET admissions = admissions + 1")
    found = db.execute("SELECT id FROM runs WHERE name = ?", (name,)).fetchone()
    if found is None:
        told = "INSERT INTO runs (name, plan, begun, sum) VALUES (?, ?, ?, '')"
        with ledger.adding(db):
            number = db.execute(told, (name, json.dumps(plan), now())).lastrowid
        assert number is not None
        ledgers.seal(db, number)
    else:
        (number,) = found
    with ledger.changing(db, number):
        db.execute("UPDATE runs SET owner = ? WHERE id = ?", (owner, number))
        which = "FROM stretches WHERE state = 'reserved' AND run = ?"
        (crashed,) = db.execute(f"SELECT coalesce(sum(last - first), 0) {which}", (number,)).fetchone()
        db.execute(f"UPDATE stretches SET state = 'charged' WHERE id IN (SELECT id {which})", (number,))
    return int(crashed)


def _confirm(held: _Held) -> None:
    if ledgers.writing_here():  # a signal came in the midst of a transaction: what is reserved stays so
        return
    with held.turn:
        if held.stretch is None or not held.mine:
            return
        # First of all the stretch is used no more, whatever interrupts what follows: the next step reserves another.
        stretch, held.stretch, held.last = held.stretch, None, -1
        with held.ledger.writing() as db:
            number = db.execute("SELECT id FROM runs WHERE owner = ?", (held.owner,)).fetchone()
            if number is None:  # another process has it now, and charges what was reserved
                return
            # Not before its begin: what interrupts a reservation leaves the position of the step before.
            told = "UPDATE stretches SET state = 'confirmed', last = max(first, ?) WHERE id = ? AND run = ?"
            with held.ledger.changing(db, *number):
                db.execute(told, (held.position, stretch, *number))


def _give_back(held: _Held) -> None:
    """At the end of a run or of its process. What cannot be written stays charged."""
    if not held.mine:
        return
    if ledgers.transaction.locked():  # the garbage collector came in the midst of one, which must end first
        _later.append(held)
        return
    try:
        _confirm(held)
        with held.ledger.writing() as db:
            db.execute("UPDATE runs SET owner = NULL WHERE owner = ?", (held.owner,))
    except LedgerError as error:
        log.warning("dpscale: %s What was reserved stays charged.", error)
    _let_go(held)


def _let_go(held: _Held) -> None:
    if held.lock is not None:
        os.close(held.lock)
        held.lock = None


_holders: "weakref.WeakSet[_Held]" = weakref.WeakSet()
_later: list[_Held] = []  # to be given back


@atexit.register
def _settle_later() -> None:
    while _later:
        _give_back(_later.pop())


def _leave_to_parent() -> None:
    """A forked process must not keep its parent's runs live."""
    for held in _holders:
        _let_go(held)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
