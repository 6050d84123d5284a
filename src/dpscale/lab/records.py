"""One record per run, as JSON, beside its results: what was run, what it cost, what came of it.

Tables, figures and reports read records and nothing else, so any of them can be made again at any time.
"""

import hashlib
import json
from collections.abc import Mapping
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
    curves: dict[str, list[int | float | None]]  # by epoch: epoch, train_loss, accuracy (None where not measured)
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
    def settings(self) -> str:
        """What runs must have in common to stand in one table."""
        about = [asked(self.config, self.role), self.versions["dpscale"], self.numerics, self.data.get("checksums")]
        return json.dumps(about, sort_keys=True)

    def save(self, out: Path) -> Path:
        """Write the record into the folder of its experiment, whole or not at all."""
        path = file(out, self.role, self.method, self.seed, self.key)
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
_DEFAULTS = {"average": 0.0, "schedule": "constant", "views": 1, "augment": {}, "standardize": False,
             "precomputed": False}  # fmt: skip


def asked(config: Mapping[str, Any], role: str) -> dict[str, Any]:
    """What of a configuration a run depends on: its choice is named apart, so how it was searched does not matter;
    neither does in which parts a batch was computed. Records from before a value could be chosen have its default."""
    left_out = {*_SEARCHED, *(() if role == "search" else ("held_out", "search_epochs"))}
    left_out |= {"search_epochs"} if config.get("search_epochs") is None else set()
    return {k: v for k, v in config.items() if k not in left_out and not (k in _DEFAULTS and v == _DEFAULTS[k])}


def file(out: Path, role: str, method: str, seed: int, key: str) -> Path:
    """Where the record of a run lies in the folder of its experiment."""
    return (out / "search" if role == "search" else out) / f"{method}-seed{seed}-{key}.json"


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read(path: Path) -> Record:
    """The record in a file; a ``ValueError`` that names the file if it is none."""
    return _record(path.read_bytes(), f"The file {path}", "run the same command again: only it is repeated")


def are_in(folder: Path) -> bool:
    """Whether a folder has records, of a search at least. None is read."""
    return any(any(place.glob(names)) for place in (folder, folder / "search") for names in (NAMES, "*.jsonl"))


def beside(folder: Path) -> Path:
    """The file beside a folder that has records of the same experiment, packed; runs in it are not made again."""
    return folder.parent / f"{folder.name}.jsonl"


def found_in(source: Path) -> list[Record]:
    """Every record of a folder, or of one packed file, if there are any.

    A folder's records are its ``METHOD-seedN-KEY.json``, one each, those of its search in its folder ``search``, and
    packed ones: its ``*.jsonl``, and those `beside` it.
    """
    packed = [source] if source.suffix == ".jsonl" else [*sorted(source.glob("*.jsonl")), beside(source)]
    found = [
        _record(line, f"Line {number} of {path}", "pack the records again")
        for path in packed if path.is_file()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
    ]  # fmt: skip
    found += [read(path) for place in (source, source / "search") for path in sorted(place.glob(NAMES))]
    return list({record.key: record for record in found}.values())


def load(source: Path) -> list[Record]:
    """The same; a ``ValueError`` if there is none."""
    if not (found := found_in(source)):
        what = f"{source} has no records" if source.exists() else f"There is no folder {source}"
        raise ValueError(f"{what}. Run 'dpscale compare digits --out {source}' first.")
    return found


def pack(folder: Path, path: Path) -> int:
    """Write the records of ``folder``, its search included, into one file, a line each; return how many it has.

    What the file has already stays there, unless the folder has another record of the same run. Packed records are
    meant to be committed, so one that names no commit of the source is refused.
    """
    if not (added := {record.key: record for record in found_in(folder)}):
        return 0
    kept = {record.key: record for record in found_in(path)}
    if nameless := [each for each in added.values() if each.commit is None and kept.get(each.key) != each]:
        raise ValueError(
            f"{len(nameless)} records in {folder} name no commit, so that nobody could repeat them. Run them from a "
            "git checkout of dpscale (pip install -e), and pack again."
        )
    # Not by key, which another release may make of other parts: what was packed before stays in its line.
    everything = sorted(
        (kept | added).values(),
        key=lambda r: (r.role, r.method, r.seed, sorted(r.choice.items()), r.repeat, r.key),
    )
    lines = (json.dumps(r.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":")) for r in everything)
    write(path, "".join(f"{line}\n" for line in lines))
    return len(everything)


def _record(text: bytes, name: str, action: str) -> Record:
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return Record(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name} is no record, or cut short or damaged: {error}. Delete it and {action}.") from None
