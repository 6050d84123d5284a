"""Lists of runs for `record.py`: a search that is alike for every method, and the final runs that follow from it.

    python lists.py search 'mnist scatter_sum 4096 80 1.4,2,2.8' … > search.jsonl
    python lists.py final search-records.jsonl > final.jsonl
    python lists.py table records.jsonl …

Every method has the same tries: each rate on each split (MNIST: three tenths of the training images; FashionMNIST: the
20,000 training images beyond N = 40,000, at two seeds). The rate with the best mean accuracy there is taken; of equal
ones that with less loss. Seeds of final runs are 0 to 4.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

METHODS = ["dp-sgd", "dp-psac", "dp-psasc", "dp-psasc-star"]
INNER = {"dp-psasc-star": {"K0": 1, "gamma0": 0.5}}
SETTING = ("preset", "model", "inputs", "batch", "epochs", "method", "rate", "gamma1", "K0", "gamma0", "schedule",
           "precision", "views", "augment", "average")  # fmt: skip
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def search(rows: list[str], methods: list[str]) -> list[dict[str, Any]]:
    """The tries, those of most points first, different kinds side by side."""
    made = []
    for row in rows:
        preset, model, batch, epochs, rates = row.split()
        tries = [(1000 + k, k) for k in range(3)] if preset == "mnist" else [(1000, 0), (1001, 0)]
        for seed, split in tries:
            for rate in rates.split(","):
                for method in methods:
                    made.append({
                        "stage": "search", "preset": preset, "model": model, "method": method, "batch": int(batch),
                        "epochs": float(epochs), "rate": float(rate), "seed": seed, "split": split,
                        "inputs": "scatter" if model.startswith("scatter") else "pixels", **INNER.get(method, {}),
                    })  # fmt: skip
    return made


def read(*files: str) -> list[dict[str, Any]]:
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    return [record for record in map(json.loads, lines) if "error" not in record]


def by_setting(records: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found = defaultdict(list)
    for record in records:
        found[tuple(record[name] for name in SETTING)].append(record)
    return found


def final(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[tuple[str, str, str], Any] = {}
    tried = defaultdict(list)
    for setting, runs in by_setting([r for r in records if r["stage"] == "search"]).items():
        of = dict(zip(SETTING, setting, strict=True))
        row = of["preset"], of["model"], of["method"]
        score = statistics.mean(r["accuracy"] for r in runs), -statistics.mean(r["loss"] for r in runs)
        tried[row].append((of["rate"], len(runs), round(100 * score[0], 3), round(-score[1], 4)))
        if row not in best or score > best[row][0]:
            best[row] = score, of
    for row, each in sorted(tried.items()):
        print(*row, sorted(each), "->", best[row][1]["rate"], file=sys.stderr)
    made = []
    for seed in range(5):
        for row, (_, of) in sorted(best.items(), key=lambda item: item[0][2] != "dp-psasc-star"):
            note = json.dumps({"tries (rate, runs, accuracy, loss)": sorted(tried[row])})
            made.append({"stage": "final", **of, "split": None, "seed": seed, "note": note})
    return made


def table(records: list[dict[str, Any]]) -> None:
    for setting, runs in sorted(by_setting(records).items(), key=str):
        of = dict(zip(SETTING, setting, strict=True))
        values = [100 * r["accuracy"] for r in sorted(runs, key=lambda r: r["seed"])]
        n = len(values)
        half = STUDENT.get(n, 2) * statistics.stdev(values) / n**0.5 if n > 1 else float("nan")
        what = [of[k] for k in ("preset", "model", "batch", "epochs", "method", "rate")]
        print(runs[0]["role"], *what, f"n={n} {statistics.mean(values):.2f} ± {half:.2f}",
              f"loss {statistics.mean(r['loss'] for r in runs):.4f}", [round(v, 2) for v in values])  # fmt: skip


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "table":
        table(read(*given))
    else:
        chosen = [g[10:].split(",") for g in given if g.startswith("--methods=")]
        rows = [g for g in given if not g.startswith("--")]
        made = search(rows, chosen[0] if chosen else METHODS) if what == "search" else final(read(*rows))
        for each in made:
            print(json.dumps(each))
