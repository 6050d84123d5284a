"""``dpscale card``: the privacy card of a run that is over, from what it left on the disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpscale import checkpoint
from dpscale.card import SCHEMA, Booked, Card, checksum, make
from dpscale.lab import records
from dpscale.ledger import Ledger
from dpscale.plan import Plan

KEPT = ("card.json", "run.ckpt")
"""What a folder may have, besides records: that of ``dpscale tune``, and that of ``dpscale train --data``."""


def card(
    source: Path, *, method: str | None = None, seed: int | None = None, delta: float | None = None,
    search: str | None = None, ledger: Path | None = None,
) -> Card:  # fmt: skip
    """The card of a run: of a record of the lab, a checkpoint that `Private.save` wrote, a card, or a folder of them.

    Args:
        source: file or folder.
        method, seed: which of several records is meant.
        delta: of the guarantee. None: the run's.
        search: how settings were chosen, if the run does not know.
        ledger: that the run is booked in.
    """
    if not source.exists():
        raise ValueError(f"There is no {source}. Give a record, a folder of records, or a checkpoint.")
    source = next((source / name for name in KEPT if (source / name).is_file()), source)
    if source.is_dir() or source.suffix == ".jsonl":
        return _of_record(_chosen(source, method, seed), delta, search)
    if source.suffix != ".json":
        return _of_checkpoint(source, delta, search, ledger)
    kept = json.loads(source.read_text(encoding="utf-8"))
    if isinstance(kept, dict) and kept.get("schema") == SCHEMA:
        if kept.get("checksum") != checksum(kept):
            raise ValueError(f"{source} was changed since it was made: its checksum is another. Make it anew.")
        return Card({name: value for name, value in kept.items() if name != "checksum"})
    return _of_record(records.read(source), delta, search)


def _chosen(folder: Path, method: str | None, seed: int | None) -> records.Record:
    found = [r for r in records.load(folder) if r.role == "final" and r.plan is not None and not r.repeat]
    found = [r for r in found if method in (None, r.method) and seed in (None, r.seed)]
    if len(found) != 1:
        runs = ", ".join(f"--method {r.method} --seed {r.seed}" for r in found[:3]) or "none that is private"
        raise ValueError(f"{folder} has {len(found)} such runs: {runs}. A card is of one: name its file, or it.")
    return found[0]


def _of_record(record: records.Record, delta: float | None, search: str | None) -> Card:
    if record.plan is None or record.role != "final":
        kind = "not private" if record.plan is None else "a try of a search, whose best alone has a card"
        raise ValueError(f"The run {record.method}, seed {record.seed}, is {kind}.")
    plan, found = Plan.from_dict(record.plan), record.search
    note = "None: the rate was given." if found is None else f"{len(found['tries'])} tries. {found['note']}"
    software = {**record.versions, "commit": record.commit or "unknown"}
    return make(
        plan, plan.steps or 0, plan.delta_of("card", delta), seeded=True, search=search or note, software=software
    )


def _of_checkpoint(path: Path, delta: float | None, search: str | None, ledger: Path | None) -> Card:
    saved = checkpoint.read(path)
    if not isinstance(saved, dict) or not {"run", "about"} <= saved.keys():
        raise ValueError(f"{path} is no checkpoint of a private run.")
    run: Mapping[str, Any] = saved["run"]
    plan = Plan.from_dict(run["plan"])
    steps = run["lost"] + run["steps_taken" if plan.sampling.independent else "last_released"]
    booked = None
    if (name := run["run"]) is not None:
        if ledger is None:
            raise ValueError(f"{path} is booked in a ledger as run {name!r}. Pass it: --ledger FILE.")
        row = next((each for each in Ledger(ledger).runs() if each.name == name), None)
        if row is None:
            raise ValueError(f"{ledger} has no run {name!r}, which {path} is booked as. Pass the ledger that has it.")
        crashed = sum(stretch.last - stretch.first for stretch in row.crashed)
        booked = Booked(ledger=Ledger(ledger), run=name, lost=row.charged - row.position, crashed=crashed)
        steps = max(steps, row.charged)  # it may have charged steps that the checkpoint does not know of
    return make(
        plan, steps, plan.delta_of("card", delta), resumed=run["resumed"], booked=booked, search=search,
        **saved["about"],
    )  # fmt: skip
