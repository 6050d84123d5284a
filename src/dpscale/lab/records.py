"""One record per run, as JSON, beside its results: what was run, what it cost, what came of it.

Tables, figures and reports read records and nothing else, so any of them can be made again at any time.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpscale.checks import is_number
from dpscale.lab.files import replacing
from dpscale.lab.provenance import installed_versions, source_commit

NAMES = "*-seed*-*.json"
"""What files of records are called; others in a folder are none of ours."""

FORMAT = 2
"""Version of the record's layout."""


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

    config: Mapping[str, Any]
    method: str
    title: str
    about: str
    role: str
    seed: int
    choice: Mapping[str, float]
    scaling: Mapping[str, Any] | None
    learning_rate: float
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    plan: Mapping[str, Any] | None
    statement: str
    curves: Mapping[str, list[float | None]]
    accuracy: float
    loss: float | None
    seconds: float
    cold_seconds: float
    data: Mapping[str, Any]
    diagnostics: Mapping[str, Any] | None = None
    search: Mapping[str, Any] | None = None
    command: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=installed_versions)
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
    for name, default in (("average", 0.0), ("schedule", "constant")):
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


def check(folder: Path) -> None:
    """Read all records of a folder, those of its search too: a ``ValueError`` that names the first that is none."""
    _found(folder)
    _found(folder / "search")


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
    found = _found(folder) + _found(folder / "search")
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
        known = {f.name for f in dataclasses.fields(Record)}
        problem = f"is not a record of format {FORMAT}"
        if isinstance(found, dict) and found.get("format") == FORMAT and set(found) == known and _sound(found):
            problem = _damage(found)
            if not problem:
                return Record(**found)
    except (UnicodeDecodeError, json.JSONDecodeError):
        pass
    raise ValueError(f"{name} {problem}. Delete it and {action}.")


def _damage(found: Mapping[str, Any]) -> str:
    """The first number that no run can have given, in words; nothing if there is none."""
    named = {"accuracy": 1, "loss": math.inf, "epsilon": math.inf, "delta": 1, "noise_multiplier": math.inf}
    named |= {"seconds": math.inf, "cold_seconds": math.inf}
    numbers = [(name, found[name], most) for name, most in named.items()]
    numbers += [(f"{name} of its config", found["config"][name], named[name]) for name in ("epsilon", "delta")]
    numbers += [("an accuracy of its curve", value, 1) for value in found["curves"]["accuracy"]]
    for name, value, most in numbers:
        if value is not None and not (is_number(value) and 0 <= value <= most and math.isfinite(value)):
            must = "a number in [0, 1]" if most == 1 else "a finite number >= 0"
            return f"is damaged: {name} is {value!r}, not {must}"
    return ""


def _sound(found: Mapping[str, Any]) -> bool:
    """Whether the parts that tables and pages are made of are what they should be. A preset names a file."""
    config, curves, choice = found["config"], found["curves"], found["choice"]
    return (
        all(isinstance(found[name], dict) for name in ("config", "curves", "choice", "data", "versions"))
        and isinstance(config.get("preset"), str)
        and re.fullmatch(r"\w[\w.-]*", config["preset"]) is not None
        and all(isinstance(config.get(name), (int, float)) for name in ("epsilon", "delta", "epochs", "batch"))
        and {"dpscale"} <= set(found["versions"])
        and all(isinstance(curves.get(name), list) for name in ("epoch", "train_loss", "accuracy"))
        and isinstance(choice.get("rate"), (int, float))
        and isinstance(found["data"].get("test"), int)
        and all(isinstance(found[name], (int, float)) for name in ("accuracy", "seconds", "cold_seconds", "seed"))
    )
