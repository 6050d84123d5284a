"""Ledger: what was spent on a data set by all runs together, on disk before it is released.

A run is admitted with its whole plan: while it goes on, the steps that it may still take count as spent for everybody
else. Its steps are then booked a stretch at a time, each on disk before its first release. When the run ends, what it
did not use is given back. A process that is killed gives nothing back: what it had reserved stays charged.

| a run ...                   | what it is charged                                                        |
|-----------------------------|---------------------------------------------------------------------------|
| goes on                     | the steps that it has reserved; where others ask for room, its whole plan |
| ends, or is closed          | the steps that it took                                                    |
| is killed                   | the steps that it took, and the rest of one stretch                       |
| goes back to a checkpoint   | besides, the steps after that checkpoint, which it will take again        |
"""

import contextlib
import datetime
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dpscale import files
from dpscale.checks import require, require_positive, require_probability
from dpscale.plan import built, differences
from dpscale.sampling import SAMPLERS, Adjacency, Sampling

if TYPE_CHECKING:
    import dp_accounting

    from dpscale.privacy_curves import Renyi

PAID = "paid searches, by Rényi DP"
"""What searches are called where costs are told."""

VERSION = 2
_MARK = 0x64707363  # "dpsc", in the header of the file
_PATIENCE = 60.0  # seconds to wait for other processes
_TABLES = (
    "total (epsilon REAL NOT NULL, delta REAL NOT NULL, sum TEXT NOT NULL, admissions INTEGER NOT NULL)",
    # The owner is a token of the process that has the run, NULL when it was closed. The sum is a checksum of the rest
    # and of the stretches: the database does not see a bit that flips in a number. No index is there to be damaged.
    "runs (id INTEGER PRIMARY KEY, name TEXT NOT NULL, plan TEXT NOT NULL, begun TEXT NOT NULL, sum TEXT NOT NULL, "
    "owner TEXT)",
    "stretches (id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES runs (id), first INTEGER NOT NULL, "
    "last INTEGER NOT NULL, lost INTEGER NOT NULL, state TEXT NOT NULL, begun TEXT NOT NULL, "
    "CHECK (0 <= first AND first <= last AND lost >= 0))",
)


transaction = threading.Lock()
"""Held by the thread of this process that writes to a ledger."""


_writer: list[int] = []  # the thread that holds it


def writing_here() -> bool:
    """Whether this very thread is in the midst of a transaction, which a signal has interrupted."""
    return _writer == [threading.get_ident()]


def _unlock_after_fork() -> None:
    global transaction
    transaction = threading.Lock()
    _writer.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_after_fork)


class LedgerError(OSError):
    """A ledger that cannot be read or written. Nothing was released that is not in it."""


class BudgetExhausted(RuntimeError):
    """Every planned step is used up; nothing was released."""


class Spent(NamedTuple):
    """What releases cost together: ε at the δ of a ledger, under an adjacency; and how that was added up."""

    epsilon: float
    adjacency: Adjacency
    how: str


class Release(NamedTuple):
    """What one run has released: so many steps of a sampler, under a noise multiplier; or the best of such runs."""

    sampling: Sampling
    noise_multiplier: float
    steps: int
    selection: Mapping[str, Any] | None = None

    @staticmethod
    def of(plan: Mapping[str, Any], steps: int) -> "Release":
        """From a plan made plain. A selection is paid for as a whole, however far it is."""
        selection = plan.get("selection")
        steps = plan["steps"] if selection and steps else steps
        return Release(built(plan["sampling"], SAMPLERS), plan["noise_multiplier"], steps, selection)

    @property
    def event(self) -> "dp_accounting.DpEvent":
        """For an accountant; of a selection, that of one try."""
        return self.sampling.event(self.noise_multiplier, self.steps)

    @property
    def kind(self) -> str:
        """What it composes tightly with, in words."""
        if self.selection is not None:
            return PAID
        replaced = self.sampling.adjacency == "replace-one"
        return "runs that replace a sample, tightly" if replaced else "runs that leave a sample out, tightly"

    @property
    def neighbours(self) -> Adjacency:
        """Under which it is composed: where a sample is left out, as if it contributed nothing."""
        return "replace-one" if self.sampling.adjacency == "replace-one" else "zero-out"

    def price(self, delta: float) -> float:
        """ε of a selection."""
        from dpscale.selection import Selection

        assert self.selection is not None
        return Selection.from_dict(self.selection).cost(self.event, self.neighbours, delta)

    def renyi(self) -> "Renyi":
        """Its Rényi DP."""
        from dpscale import accounting
        from dpscale.selection import Selection

        if self.selection is None:
            return accounting.renyi(self.event, adjacency=self.neighbours)
        return Selection.from_dict(self.selection).renyi(self.event, self.neighbours)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps ``first`` + 1 to ``last`` of a run.

    Attributes:
        lost: steps charged to the run before, that it went back behind.
        state: "reserved", while the steps are taken; "confirmed", when they were; "charged", if their process ended
            without a word.
        begun: when it was reserved, by the clock of that machine: for show, nothing depends on it.
    """

    first: int
    last: int
    lost: int
    state: str
    begun: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in a ledger.

    Attributes:
        plan: as `Plan.to_dict` gave it.
        live: whether a process has it now.
    """

    name: str
    plan: dict[str, Any]
    begun: str
    live: bool
    stretches: tuple[Stretch, ...]

    @property
    def position(self) -> int:
        """The last step that it has reserved."""
        return self.stretches[-1].last if self.stretches else 0

    @property
    def charged(self) -> int:
        """Steps that it pays for, those that it had to take again included."""
        return self.position + (self.stretches[-1].lost if self.stretches else 0)

    @property
    def crashed(self) -> tuple[Stretch, ...]:
        """Stretches that were reserved by a process that then ended without a word."""
        return tuple(s for s in self.stretches if s.state == "charged" or (s.state == "reserved" and not self.live))

    def lost_from(self, position: int) -> int:
        """Steps charged in vain, if the run goes on after step ``position``."""
        sampling, again = built(self.plan["sampling"], SAMPLERS), max(0, self.position - position)
        if again and not sampling.independent:  # a sample of a batch that comes again is in one release more per epoch
            each = sampling.steps(1)
            again = (-(-self.position // each) - position // each) * each
        return self.charged - self.position + again


class Ledger:
    """The privacy budget of a data set, in a file that every run on these data books into.

    Guarantee: all that runs with this ledger release is together (``epsilon``, ``delta``)-differentially private, and
    at every moment the file charges at least what was released. A run that could exceed the total is refused before it
    begins.

    Args:
        path: of the file, on a local disk; made if it is not there. Beside it lie files of SQLite, and a folder of
            locks.
        epsilon: the total. None: that of the file.
        delta: of the total. None: that of the file.

    Example:
        >>> import tempfile, dpscale
        >>> ledger = Ledger(tempfile.mkdtemp() + "/patients.ledger", epsilon=3, delta=1e-5)
        >>> ledger.spent().epsilon
        0.0
    """

    def __init__(self, path: str | Path, *, epsilon: float | None = None, delta: float | None = None) -> None:
        self.path = Path(path).resolve()  # locks lie beside the file itself, whatever it was called by
        if epsilon is not None:
            require_positive("Ledger", "epsilon", epsilon, action="It is the budget of all runs together.")
        if delta is not None:
            require_probability("Ledger", "delta", delta, action="Take it well below 1/size, such as 1e-5.")
        if not files.HAS_LOCKS:
            raise NotImplementedError("A ledger needs file locks (flock), which this system does not have.")
        self._make(epsilon, delta)
        with self.reading() as db:
            self.epsilon, self.delta = self._total(db)
        for name, asked, there in (("epsilon", epsilon, self.epsilon), ("delta", delta, self.delta)):
            action = "A total cannot be changed afterwards. Leave it out, or begin another ledger for other data."
            require(asked in (None, there), "Ledger", name, f"{there!r}, as in {self.path}", asked, action)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, epsilon={self.epsilon:g}, delta={self.delta:g})"

    def runs(self) -> list[Run]:
        """All that is booked, in the order in which runs began."""
        with self.reading() as db:
            return self.rows(db)

    def spent(self, runs: Sequence[Run] | None = None) -> Spent:
        """What was charged so far, or would have been to these runs."""
        runs = self.runs() if runs is None else runs
        return compose([Release.of(run.plan, run.charged) for run in runs], self.delta)

    def require_fitting(self, name: str, plan: Mapping[str, Any], runs: Sequence[Run]) -> None:
        """Refuse a plan that is another than the run's, or that together with all others could exceed the total."""
        for run in runs:
            if run.name == name and (other := [*differences(run.plan, plan)]):
                raise ValueError(
                    f"The run {name!r} in {self.path} has another plan: {'; '.join(other)}. Resume it with the plan "
                    "that it has, or give a new run another name."
                )
        units = {_unit(run.plan) for run in runs if run.name != name}
        if units - {_unit(plan)}:
            raise ValueError(
                f"The run {name!r} protects {_unit(plan)}, and {self.path} has runs that protect {units.pop()}. What "
                "they spend does not add up. Keep a ledger for each; Plan(..., records=8) is for people."
            )
        # A live run may still take every step of its plan.
        taken = [
            Release.of(run.plan, run.plan["steps"] if run.live else run.charged) for run in runs if run.name != name
        ]
        would = compose([*taken, Release.of(plan, plan["steps"])], self.delta).epsilon
        if would > self.epsilon:
            before, live = compose(taken, self.delta).epsilon, sum(run.live for run in runs if run.name != name)
            going = f", {live} of them going on and counted with their whole plans" if live else ""
            raise ValueError(
                f"The plan of the run {name!r} does not fit into the budget: with the {len(taken)} other runs{going}, "
                f"epsilon would be {would:.4g} at delta {self.delta:g}, and the total of {self.path} is "
                f"{self.epsilon:g}. Without it, it is {before:.4g}. Nothing was released. Plan fewer steps, or more "
                "noise."
            )

    def rows(self, db: sqlite3.Connection, own: str | None = None) -> list[Run]:
        """The runs within a transaction. Its ``own`` run does not count as live to a process."""
        found: dict[str, Run] = {}
        self._total(db)
        for kept in self._as_written(db):
            _, name, plan, begun = kept.row
            names = ("first", "last", "lost", "state", "begun")
            stretches = tuple(Stretch(**dict(zip(names, row[2:], strict=True))) for row in kept.stretches)
            live = kept.owner is not None and name != own and files.is_locked(self.lock_file(name))
            try:
                plain = json.loads(plan)
                _require_known(plain)
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(self.path, f"the plan of the run {name!r}: {error!r}") from error
            if name in found:
                raise _damaged(self.path, f"two runs {name!r}")
            found[name] = Run(name=name, plan=plain, begun=begun, live=live, stretches=stretches)
        return list(found.values())

    def _total(self, db: sqlite3.Connection) -> tuple[float, float]:
        """ε and δ of all runs together."""
        found = db.execute("SELECT epsilon, delta, sum FROM total").fetchall()
        if len(found) != 1 or _sum_of_total(db, found[0][:2]) != found[0][2]:
            raise _damaged(self.path, "its total, or how many runs it has, is not as it was written")
        return found[0][:2]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def adding(self, db: sqlite3.Connection) -> Iterator[None]:
        """Within, a run is added, if none is missing."""
        total = self._total(db)
        yield
        db.execute("UPDATE total SET sum = ?", (_sum_of_total(db, total),))

    def _as_written(self, db: sqlite3.Connection, number: int | None = None) -> Iterator["_Kept"]:
        """What is kept of each run, or of one. Refused where it is not what was written."""
        for kept in _kept(db, number):
            if kept.sum != kept.found:
                raise _damaged(self.path, f"the run {kept.row[1]!r} or a stretch of it is not as it was written")
            yield kept

    @contextlib.contextmanager
    def changing(self, db: sqlite3.Connection, number: int) -> Iterator[None]:
        """Within, rows of a run are written, if they are as they were left: no damage is sealed."""
        list(self._as_written(db, number))
        yield
        seal(db, number)

    def lock_file(self, name: str) -> Path:
        """Whose lock says that a process has the run: it ends with the process, and knows of no clock."""
        digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        return self.path.with_name(self.path.name + ".locks") / digest

    def _make(self, epsilon: float | None, delta: float | None) -> None:
        """Make the file if it is not there, and check that it is a ledger."""
        action = "It is a folder: name a file in it."
        require(not self.path.is_dir(), "Ledger", "path", "of a file", str(self.path), action)
        if not self.path.exists() or self._look() == (0, 0, 0):  # or one that was killed while it was made
            for name, value in (("epsilon", epsilon), ("delta", delta)):
                must, action = f"given: there is no ledger {self.path} yet", "Give the total of all runs, once."
                require(value is not None, "Ledger", name, must, value, action)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with (
                    files.locked(self.path.parent),
                    _translated(self.path, gone=False),
                    contextlib.closing(self._connect("rwc")) as db,
                ):
                    if db.execute("PRAGMA user_version").fetchone() == (0,):
                        _create(db, epsilon, delta)
            except LedgerError:
                raise
            except OSError as error:
                raise LedgerError(f"Cannot make the ledger {self.path}: {error}. Nothing was released.") from error
        mark, version, _ = self._look()
        if mark != _MARK:
            raise LedgerError(f"{self.path} is no ledger of dpscale. Nothing was changed.")
        if version != VERSION:
            raise LedgerError(
                f"{self.path} is a ledger of version {version}, and this release of dpscale reads version {VERSION}. "
                "Nothing was changed."
            )

    def _look(self) -> tuple[int, int, int]:
        """Mark and version of the file, and the number of its tables; refuses a damaged one."""
        with self.reading() as db:
            if (told := db.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
                raise _damaged(self.path, told)
            if db.execute("PRAGMA foreign_key_check").fetchone():
                raise _damaged(self.path, "steps of a run that is not there")
            mark, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            return mark, version, db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]

    def _connect(self, mode: str = "rw") -> sqlite3.Connection:
        # One for each transaction: none is carried over a fork, or shared by threads. A file that is gone is not made.
        db = sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", uri=True, timeout=_PATIENCE, isolation_level=None)
        db.execute("PRAGMA synchronous = FULL")
        db.text_factory = lambda text: text.decode(errors="backslashreplace")  # what is damaged has a name still
        return db

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One moment of the ledger."""
        with _translated(self.path), contextlib.closing(self._connect()) as db:
            db.execute("BEGIN")
            yield db

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """All of it is on the disk when the block has ended well, or none; nobody else writes meanwhile."""
        with transaction, _translated(self.path), contextlib.closing(self._connect()) as db:
            _writer[:] = [threading.get_ident()]
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            finally:
                _writer.clear()


class _Kept(NamedTuple):
    """What lies in the file of a run: its row and those of its stretches, and the checksum that they had."""

    row: tuple[Any, ...]
    stretches: Sequence[tuple[Any, ...]]
    sum: str
    owner: str | None

    @property
    def found(self) -> str:
        """The checksum that they have."""
        return files.checksum(repr((self.row, self.stretches)))


def _kept(db: sqlite3.Connection, number: int | None = None) -> list[_Kept]:
    """Of each run, or of one."""
    which = "coalesce(?, {0}) = {0} ORDER BY id"
    stretches: dict[Any, list[tuple[Any, ...]]] = {}
    for row in db.execute(
        f"SELECT id, run, first, last, lost, state, begun FROM stretches WHERE {which.format('run')}", (number,)
    ):
        stretches.setdefault(row[1], []).append(row)
    runs = db.execute(f"SELECT sum, owner, id, name, plan, begun FROM runs WHERE {which.format('id')}", (number,))
    return [_Kept(tuple(row), stretches.get(row[0], []), told, owner) for told, owner, *row in runs]


def _sum_of_total(db: sqlite3.Connection, total: tuple[float, float]) -> str:
    """A checksum of what all runs share, and of how many they are."""
    return files.checksum(repr((total, db.execute("SELECT count(*), max(id) FROM runs").fetchone())))


def seal(db: sqlite3.Connection, number: int) -> None:
    """Write down the checksum of a run as it is now."""
    (kept,) = _kept(db, number)
    db.execute("UPDATE runs SET sum = ? WHERE id = ?", (kept.found, number))


def _require_known(plan: Mapping[str, Any]) -> None:
    """Refuse a plan made plain whose price is not known."""
    Release.of(plan, 0)
    if plan.get("selection") is not None:
        from dpscale.selection import Selection

        Selection.from_dict(plan["selection"])


def _unit(plan: Mapping[str, Any]) -> str:
    return "single records" if plan.get("records") is None else "people"


def compose(releases: Sequence[Release], delta: float) -> Spent:
    """What releases on the same data cost together, at ``delta``: the least of the bounds that are known to hold.

    | there are                                          | bound                                             | tight |
    |----------------------------------------------------|---------------------------------------------------|-------|
    | runs under one adjacency                           | composed by `accounting.epsilon`                  | yes   |
    | one paid search                                    | `Selection.cost`, by Rényi DP                     | no    |
    | two or three of: runs that leave a sample out,     | the lesser of: ε of each of these at an equal     | no    |
    | runs that replace one, paid searches               | share of δ, added up; Rényi DP of everything      |       |

    A sampler whose neighbours have one sample more or less makes the same promise where that sample contributes nothing
    (zero-out), and so, with room to spare, does one whose neighbours replace a sample: nothing is one of the things to
    replace it by. So both kinds together are stated under zero-out. Rényi DP, at one order, adds up over whatever is
    released (Mironov 2017, Proposition 1); of a selection nothing else is known.
    """
    releases = [release for release in releases if release.steps]
    parts: dict[str, list[Release]] = {}
    for release in releases:
        parts.setdefault(release.kind, []).append(release)
    stated = {release.sampling.adjacency for release in releases}
    adjacency: Adjacency = stated.pop() if len(stated) == 1 else "zero-out"
    if len(parts) > 1:
        added = sum(_cost(part, delta / len(parts)) for part in parts.values())
        together = _renyi(releases).epsilon(delta)
        if together < added:
            return Spent(together, adjacency, "composed by Rényi DP, everything together")
        return Spent(added, adjacency, f"added up at an equal share of delta each: {'; '.join(sorted(parts))}")
    how = "composed by Rényi DP" if PAID in parts else "composed tightly, all runs together"
    return Spent(sum(_cost(part, delta) for part in parts.values()), adjacency, how)


def _cost(same: Sequence[Release], delta: float) -> float:
    """ε of releases of one kind."""
    from dpscale import accounting

    if same[0].kind == PAID:
        return same[0].price(delta) if len(same) == 1 else _renyi(same).epsilon(delta)
    import dp_accounting

    event = dp_accounting.ComposedDpEvent([release.event for release in same])
    return accounting.epsilon(event, delta=delta, adjacency=same[0].neighbours)


def _renyi(releases: Sequence[Release]) -> "Renyi":
    """Rényi DP of all of them, order by order."""
    from dpscale.privacy_curves import Renyi

    return Renyi.total(release.renyi() for release in releases)


def _create(db: sqlite3.Connection, epsilon: float | None, delta: float | None) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("BEGIN IMMEDIATE")
    for table in _TABLES:
        db.execute(f"CREATE TABLE {table}")
    assert epsilon is not None and delta is not None
    given = float(epsilon), float(delta)
    db.execute("INSERT INTO total VALUES (?, ?, ?, 0)", (*given, _sum_of_total(db, given)))
    db.execute(f"PRAGMA application_id = {_MARK}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.execute("COMMIT")


def now() -> str:
    """By this machine's clock, for show."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _translated(path: Path, gone: bool = True) -> Iterator[None]:
    """Errors of the database in words: what is the matter, and that nothing was released.

    Args:
        gone: whether a file that is not there was there before.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    except sqlite3.Error as error:
        told = str(error)
        if gone and not path.exists() and path.parent.exists():
            why = f"The ledger {path} is gone. Bring it back: what it has charged must not be forgotten."
        elif "full" in told or "I/O" in told:
            why = f"The ledger {path} could not be written ({told}): is the disk full? Make room, and go on."
        elif "readonly" in told or "unable to open" in told:
            why = (
                f"The ledger {path} cannot be opened for writing ({told}). Check the rights of the file and its folder."
            )
        elif "locked" in told or "busy" in told:
            why = f"The ledger {path} was locked by other processes for {_PATIENCE:g} s. Try again."
        elif isinstance(error, sqlite3.OperationalError) and "no such" not in told and "decode" not in told:
            why = f"The ledger {path} could not be used: {told}."
        else:
            raise _damaged(path, told) from error
        raise LedgerError(f"{why} Nothing was booked, and nothing was released.") from error


def _damaged(path: Path, told: str) -> LedgerError:
    told = " ".join(told.split())
    return LedgerError(
        f"{path} is damaged, or no ledger ({told}). Nothing was changed or released. Bring back a copy of it: what it "
        "has charged must not be forgotten."
    )
