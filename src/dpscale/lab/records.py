"""One record per run, as JSON, beside its results: what was run, what it cost, what came of it.

Tables, figures and reports read records and nothing else, so any of them can be made again at any time.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpscale.lab.provenance import installed_versions, source_commit

FORMAT = 1
"""Version of the record's layout."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run was and what came of it.

    ``diagnostics`` are gradient norms and weights, taken from the data *without noise*: they carry
    ``not_private: true`` and are for research on public data only. So are the losses in ``curves``.

    Args:
        role: ``"final"``, measured on the test data; ``"search"``, measured on held-out training data.
        rate, learning_rate: the normalized rate (learning rate × bound), and what SGD got.
        curves: per epoch: ``epoch``, ``train_loss``, ``accuracy``, ``mean_weight``.
        accuracy, loss: at the end of the last epoch, which is fixed beforehand; no loss if it is not finite.
        search: how the rate was found, and what that leaves out of epsilon; None if it was given.
    """

    config: Mapping[str, Any]
    method: str
    title: str
    about: str
    role: str
    seed: int
    scaling: Mapping[str, Any] | None
    rate: float
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
        return key(self.config, self.role, self.method, self.seed, self.learning_rate, self.versions["dpscale"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def save(self, folder: Path) -> Path:
        """Write the record into ``folder``, whole or not at all."""
        path = file(folder, self.method, self.seed, self.key)
        write(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path


def key(config: Mapping[str, Any], role: str, method: str, seed: int, learning_rate: float, version: str) -> str:
    """Twelve hexadecimal digits that stand for what a run is asked to do."""
    asked = [FORMAT, dict(config), role, method, seed, learning_rate, version]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def file(folder: Path, method: str, seed: int, key: str) -> Path:
    """Where the record of a run lies."""
    return folder / f"{method}-seed{seed}-{key}.json"


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all: under another name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: Path) -> Record:
    """The record in a file; a ``ValueError`` that names the file if it is none."""
    problem = "is not JSON (cut short, perhaps)"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in dataclasses.fields(Record)}
        if isinstance(found, dict) and found.get("format") == FORMAT and set(found) == known:
            return Record(**found)
        problem = f"is not a record of format {FORMAT}"
    except (UnicodeDecodeError, json.JSONDecodeError):
        pass
    raise ValueError(f"The file {path} {problem}. Delete it and run the same command again: only it is repeated.")


def load(folder: Path) -> list[Record]:
    """Every record in a folder, in the order of file names; a ``ValueError`` if there is none."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}. Run 'dpscale compare digits --out {folder}' first.")
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"The folder {folder} has no records. Run 'dpscale compare digits --out {folder}' first.")
    return found
