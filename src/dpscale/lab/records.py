"""One record per run, as JSON, beside its results: what was run, what it cost, what came of it.

Tables, figures and reports read records and nothing else, so any of them can be made again at any time.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from dpscale.files import replacing
from dpscale.lab.kinds import fault
from dpscale.lab.provenance import installed_versions, source_commit
from dpscale.scaling import RULES

NAMES = "*-seed*-*.json"
"""What files of records are called; others in a folder are none of ours."""

FORMAT = 2
"""Version of the record's layout."""


# Beside a type, what `fault` asks for as well: the least and the most, a pattern, or the keys of a mapping.
Share = Annotated[float, (0, 1)]
Amount = Annotated[float, (0, math.inf)]
Count = Annotated[int, (1, 2**63)]


class _Settings(TypedDict):
    preset: Annotated[str, r"\w[\w.-]*"]  # it names a file
    model: str
    epsilon: Amount
    delta: Share
    epochs: Count
    batch: Count
    optimizer: NotRequired[str]
    schedule: NotRequired[str]
    average: NotRequired[Share]
    augment: NotRequired[Mapping[str, Amount]]
    views: NotRequired[Count]
    note: NotRequired[str]


class _Rate(TypedDict):
    rate: float


Chosen = Annotated[Mapping[Annotated[str, "rate|gamma1|K0|gamma0"], float], _Rate]


class _Curves(TypedDict):
    epoch: list[int]
    train_loss: list[float | None]
    accuracy: list[Share | None]


class _Features(TypedDict):
    encoder: str


class _Samples(TypedDict):
    train: Count
    test: Count
    source: NotRequired[Mapping[str, Any]]
    features: NotRequired[_Features]


class _Histogram(TypedDict):
    bin_width: Annotated[float, (1e-6, 10)]
    counts: Annotated[list[Count], (1, math.inf)]


class _Norms(_Histogram):
    epochs: Annotated[list[int], (1, math.inf)]
    log10_norm: list[Annotated[float, (-400, 400)]]


class _Similarity(_Histogram):
    cosine: list[Annotated[float, (-1, 1)]]


class _Diagnostics(TypedDict):
    norms: _Norms | None
    similarity: _Similarity | None
    mean_weight: list[Annotated[float, (0, 1e100)] | None]


class _Try(TypedDict):
    choice: Chosen
    accuracy: Share


class _Search(TypedDict):
    note: str
    held_out: Share
    epochs: NotRequired[Count]
    searched_for: str
    tries: list[_Try]
    chosen: Chosen


class _Versions(TypedDict):
    dpscale: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run was and what came of it.

    ``diagnostics`` are gradient norms and weights, taken from the data *without noise*: they carry
    ``not_private: true`` and are for research on public data only. So are the losses in ``curves``.

    Args:
        role: ``"final"``, measured on the test data; ``"search"``, measured on held-out training data.
        choice, learning_rate: the normalized rate and the momentum, as in `presets.Choice`, and what the optimizer got.
        curves: per epoch: ``epoch``, ``train_loss``, ``accuracy``, which is None where it was not measured.
        accuracy, loss: at the end of the last epoch, which is fixed beforehand; no loss if it is not finite.
        seconds, cold_seconds: of training and of measuring its curve, and of what came before the first step.
        data: how many samples, and where they come from.
        search: how the choice was found, and what that leaves out of epsilon; None if it was given.
    """

    config: Annotated[Mapping[str, Any], _Settings]
    method: str
    title: str
    about: str
    role: Annotated[str, "final|search"]
    seed: int
    choice: Chosen
    scaling: Mapping[str, Any] | None
    learning_rate: float
    epsilon: Amount | None
    delta: Share | None
    noise_multiplier: Amount | None
    plan: Mapping[str, Any] | None
    statement: str
    curves: Annotated[Mapping[str, list[float | None]], _Curves]
    accuracy: Share
    loss: Amount | None
    seconds: Amount
    cold_seconds: Amount
    data: Annotated[Mapping[str, Any], _Samples]
    diagnostics: Annotated[Mapping[str, Any], _Diagnostics] | None = None
    search: Annotated[Mapping[str, Any], _Search] | None = None
    command: str = ""
    created: str = ""
    versions: Annotated[Mapping[str, str], _Versions] = field(default_factory=installed_versions)
    commit: str | None = field(default_factory=source_commit)
    format: int = FORMAT

    @property
    def key(self) -> str:
        """A short name for what was asked for: two runs with one key would do the same."""
        return key(self.config, self.role, self.method, self.seed, self.choice, self.versions["dpscale"])

    @property
    def rate(self) -> float:
        """The normalized rate."""
        return self.choice["rate"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def save(self, folder: Path) -> Path:
        """Write the record into ``folder``, whole or not at all."""
        path = file(folder, self.method, self.seed, self.key)
        write(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path


def key(config: Mapping[str, Any], role: str, method: str, seed: int, choice: Mapping[str, float], version: str) -> str:
    """Twelve hexadecimal digits that stand for what a run is asked to do."""
    wanted = [FORMAT, asked(config, role), role, method, seed, dict(choice), version]
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]


def asked(config: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What of a configuration a run depends on: its choice is named apart, so how it was searched does not matter;
    neither does in which parts a batch was computed."""
    wanted = dict(config)
    for name in ("tune", "grid", "gamma1s", "inner", "rates", "note", "micro_batch"):
        wanted.pop(name, None)
    if role != "search":
        wanted.pop("held_out", None)
    if role != "search" or wanted.get("search_epochs") is None:
        wanted.pop("search_epochs", None)
    defaults = {"average": 0.0, "schedule": "constant", "views": 1, "augment": {}, "standardize": False}
    for name, default in defaults.items():
        if wanted.get(name) == default:
            del wanted[name]  # records from before it could be chosen are those without
    return wanted


def file(folder: Path, method: str, seed: int, key: str) -> Path:
    """Where the record of a run lies."""
    return folder / f"{method}-seed{seed}-{key}.json"


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read(path: Path) -> Record:
    """The record in a file; a ``ValueError`` that names the file if it is none."""
    return _record(path.read_bytes(), f"The file {path}", "run the same command again: only it is repeated")


def load(source: Path) -> list[Record]:
    """Every record in a folder, in the order of file names, or in one packed file; a ``ValueError`` if there is none.

    A folder's own records are its ``METHOD-seedN-KEY.json``, one each, its ``*.jsonl``, packed, and those packed
    `beside` it; those of a search lie in its folder ``search``, or packed with the others.
    """
    if not source.is_dir() and not _is_packed(source):
        raise ValueError(f"There is no folder {source}. Run 'dpscale compare digits --out {source}' first.")
    found = _found(source)
    if not found:
        kind = "folder" if source.is_dir() else "file"
        raise ValueError(f"The {kind} {source} has no records. Run 'dpscale compare digits --out {source}' first.")
    return found


def are_in(folder: Path) -> bool:
    """Whether a folder has records, of a search at least. None is read."""
    return any(any(place.glob(names)) for place in (folder, folder / "search") for names in (NAMES, "*.jsonl"))


def whole(folder: Path) -> list[Record]:
    """All records of a folder or of a packed file, those of its search too, if there are any.

    A ``ValueError`` names the first that is none.
    """
    return _found(folder) + searched(folder)


def searched(folder: Path) -> list[Record]:
    """The records of a search that a folder keeps apart from those of its final runs."""
    return _found(folder / "search")


def _is_packed(source: Path) -> bool:
    return source.suffix == ".jsonl" and source.is_file()


def _found(source: Path) -> list[Record]:
    """Every record of a folder or of one packed file; there may be none."""
    if _is_packed(source):
        return _unpacked(source)
    found = [read(path) for path in sorted(source.glob(NAMES))]
    packed = [*sorted(source.glob("*.jsonl")), *([beside(source)] if beside(source).is_file() else [])]
    loose = {record.key for record in found}
    return found + [record for path in packed for record in _unpacked(path) if record.key not in loose]


def beside(folder: Path) -> Path:
    """The file beside a folder that has records of the same experiment, packed; runs in it are not made again."""
    return folder.parent / f"{folder.name}.jsonl"


def pack(folder: Path, path: Path) -> int:
    """Write the records of ``folder``, its search included, into one file, a line each; return how many it has.

    What the file has already stays there, unless the folder has another record of the same run.
    """
    found = whole(folder)
    if not found:
        return 0
    kept = {record.key: record for record in _unpacked(path)} if path.is_file() else {}
    found = list((kept | {record.key: record for record in found}).values())
    # Not by key, which another release may make of other parts: what was packed before stays in its line.
    found.sort(key=lambda record: (record.role, record.method, record.seed, sorted(record.choice.items()), record.key))
    lines = (json.dumps(r.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":")) for r in found)
    write(path, "".join(f"{line}\n" for line in lines))
    return len(found)


def _unpacked(path: Path) -> list[Record]:
    return [
        _record(line, f"Line {number} of {path}", "pack the records again")
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
    ]


def _record(text: bytes, name: str, action: str) -> Record:
    problem = "is not JSON (cut short, perhaps)"
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):
        found = None
    else:
        problem = f"is not a record of format {FORMAT}"
    known = {f.name for f in dataclasses.fields(Record)}
    if isinstance(found, dict) and found.get("format") == FORMAT and set(found) == known:
        if not (told := fault(found, Record) or _misfit(found)):
            return Record(**found)
        problem = f"is damaged: {told}"
    raise ValueError(f"{name} {problem}. Delete it and {action}.")


def _misfit(found: Mapping[str, Any]) -> str:
    """Parts of a record that do not go together, each of its kind though it is, in words; nothing if all do."""
    curves, measured, rule = found["curves"], found["diagnostics"] or {}, found["scaling"]
    epochs = found["config"]["epochs"] if found["role"] == "final" else len(curves["epoch"])
    lists = [(f"curves.{name}", curves[name], epochs) for name in _Curves.__annotations__]
    lists += [("diagnostics.mean_weight", measured["mean_weight"], epochs)] if measured else []
    for name, centres in (("norms", "log10_norm"), ("similarity", "cosine")):
        if part := measured.get(name):
            lists.append((f"diagnostics.{name}.{centres}", part[centres], len(part["counts"])))
    for name, values, count in lists:
        if len(values) != count:
            return f"{name} has {len(values)} values, not {count}"
    if curves["accuracy"][-1:] == [None]:
        return "the last of curves.accuracy is None, not a number"
    try:
        if rule is not None:
            RULES[rule["rule"]](**{name: value for name, value in rule.items() if name != "rule"})
    except (KeyError, TypeError, ValueError, OverflowError):
        return f"scaling is {rule!r}, not a rule and its constants"
    return ""
