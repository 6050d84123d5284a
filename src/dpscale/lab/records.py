"""One record per run, as JSON, beside its results: what was run, what it cost, what came of it.

Tables, figures and reports read records and nothing else, so any of them can be made again at any time.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dpscale.files import replacing
from dpscale.lab.provenance import NUMERICS, installed_versions
from dpscale.lab.settings import Settings
from dpscale.provenance import source_commit

NAMES = "*-seed*-*.json"
"""What files of records are called; others in a folder are none of ours."""

FORMAT = 2
"""Version of the record's layout."""

Role = Literal["final", "search"]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]


class Record(Settings):
    """What a run was and what came of it.

    ``diagnostics`` are gradient norms and weights, taken from the data *without noise*: they carry
    ``not_private: true`` and are for research on public data only. So are the losses in ``curves``.
    """

    config: dict[str, Any]
    method: str
    title: str
    about: str
    role: Role  # measured on the test data, or on held-out training data
    seed: int
    repeat: int = 0  # the same run once more, for the noise of the machine; 0 is the run that counts
    choice: dict[str, int | float]  # the normalized rate and the momentum, as in `config.Choice`
    scaling: dict[str, Any] | None
    learning_rate: float  # what the optimizer got
    epsilon: Amount | None
    delta: Share | None
    noise_multiplier: Amount | None
    plan: dict[str, Any] | None
    statement: str
    curves: dict[
        str, list[int | float | None]
    ]  # per epoch: epoch, train_loss, accuracy (None where it was not measured)
    accuracy: Share  # at the end of the last epoch, which is fixed beforehand
    loss: Amount | None  # None if it is not finite
    seconds: Amount  # of training and of measuring its curve
    cold_seconds: Amount  # of what came before the first step
    data: dict[str, Any]  # how many samples, and where they come from
    diagnostics: dict[str, Any] | None = None
    search: dict[str, Any] | None = None  # how the choice was found; None if it was given
    command: str = ""
    created: str = ""
    versions: dict[str, str] = Field(default_factory=lambda: dict(installed_versions()))
    commit: str | None = Field(default_factory=source_commit)
    numerics: int = 1  # records from before it was noted are of the first version
    format: Literal[2] = 2

    @property
    def key(self) -> str:
        """A short name for what was asked for: two runs with one key would do the same."""
        return key(
            self.config, self.role, self.method, self.seed, self.choice, self.versions["dpscale"],
            numerics=self.numerics, repeat=self.repeat,
        )  # fmt: skip

    @property
    def rate(self) -> float:
        """The normalized rate."""
        return self.choice["rate"]

    @property
    def settings(self) -> str:
        """What runs must have in common to stand in one table."""
        about = [asked(self.config, self.role), self.versions["dpscale"], self.numerics, self.data.get("checksums")]
        return json.dumps(about, sort_keys=True)

    def save(self, folder: Path) -> Path:
        """Write the record into ``folder``, whole or not at all."""
        path = file(folder, self.method, self.seed, self.key)
        write(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path


def key(
    config: Mapping[str, Any], role: str, method: str, seed: int, choice: Mapping[str, float], version: str, *,
    numerics: int = NUMERICS, repeat: int = 0,
) -> str:  # fmt: skip
    """Twelve hexadecimal digits that stand for what a run is asked to do."""
    wanted = [FORMAT, asked(config, role), role, method, seed, dict(choice), version]
    wanted += [{"numerics": numerics, "repeat": repeat}] if (numerics, repeat) != (1, 0) else []
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]


_SEARCHED = ("tune", "grid", "gamma1s", "inner", "rates", "note", "micro_batch", "search_seeds", "widen")
_DEFAULTS = {"average": 0.0, "schedule": "constant", "views": 1, "augment": {}, "standardize": False}


def asked(config: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What of a configuration a run depends on: its choice is named apart, so how it was searched does not matter;
    neither does in which parts a batch was computed. Records from before a value could be chosen have its default."""
    left_out = {*_SEARCHED, *(() if role == "search" else ("held_out", "search_epochs"))}
    left_out |= {"search_epochs"} if config.get("search_epochs") is None else set()
    return {k: v for k, v in config.items() if k not in left_out and not (k in _DEFAULTS and v == _DEFAULTS[k])}


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
    """All records of a folder or of a packed file, those of its search too, if there are any."""
    return _found(folder) + _found(folder / "search")


def beside(folder: Path) -> Path:
    """The file beside a folder that has records of the same experiment, packed; runs in it are not made again."""
    return folder.parent / f"{folder.name}.jsonl"


def pack(folder: Path, path: Path) -> int:
    """Write the records of ``folder``, its search included, into one file, a line each; return how many it has.

    What the file has already stays there, unless the folder has another record of the same run. Packed records are
    meant to be committed, so one that names no commit of the source is refused.
    """
    found = whole(folder)
    if not found:
        return 0
    kept = {record.key: record for record in _unpacked(path)} if path.is_file() else {}
    added = {record.key: record for record in found}
    nameless = [record.method for record in added.values() if record.commit is None and kept.get(record.key) != record]
    if nameless:
        raise ValueError(
            f"{len(nameless)} records in {folder} name no commit, so that nobody could repeat them. Run them from a "
            "git checkout of dpscale (pip install -e), and pack again."
        )
    everything = sorted((kept | added).values(), key=_order)
    write(path, "".join(f"{_line(record)}\n" for record in everything))
    return len(everything)


def _order(record: Record) -> tuple[Any, ...]:
    # Not by key, which another release may make of other parts: what was packed before stays in its line.
    return record.role, record.method, record.seed, sorted(record.choice.items()), record.repeat, record.key


def _line(record: Record) -> str:
    return json.dumps(record.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _is_packed(source: Path) -> bool:
    return source.suffix == ".jsonl" and source.is_file()


def _found(source: Path) -> list[Record]:
    """Every record of a folder or of one packed file; there may be none."""
    if _is_packed(source):
        return _unpacked(source)
    loose = [read(path) for path in sorted(source.glob(NAMES))]
    packed = [*sorted(source.glob("*.jsonl")), *([beside(source)] if beside(source).is_file() else [])]
    return list({r.key: r for r in (*_all(packed), *loose)}.values()) if packed else loose


def _all(paths: Iterable[Path]) -> list[Record]:
    return [record for path in paths for record in _unpacked(path)]


def _unpacked(path: Path) -> list[Record]:
    return [
        _record(line, f"Line {number} of {path}", "pack the records again")
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
    ]


def _record(text: bytes, name: str, action: str) -> Record:
    try:
        values = json.loads(text.decode())
    except ValueError:
        raise ValueError(f"{name} is not JSON (cut short, perhaps). Delete it and {action}.") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"{name} is not a record of format {FORMAT}. Delete it and {action}.")
    try:
        return Record(**values)
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error} Delete it and {action}.") from None
