"""Every figure of docs/results.md is that of the committed records, to the digit."""

import re
from pathlib import Path

import pytest

from dpscale.lab import paper

ROOT = Path(__file__).parents[1]
NAMES = {
    "MNIST": "mnist", "FashionMNIST": "fashion-mnist", "CIFAR-10 features": "cifar10-simclr",
    "CIFAR-10": "cifar10-simclr", "CelebA": "celeba-male", "Imagenette": "imagenette",
}  # fmt: skip
METHODS = {
    "DP-SGD": "dp-sgd", "Auto-S": "auto-s", "DP-PSAC": "dp-psac", "DP-PSASC": "dp-psasc",
    "DP-PSASC\\*": "dp-psasc-star", "PSAC at rate/s": "psac-lr-over-s",
}  # fmt: skip
TEXT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found():
    return {one.preset: one for one in paper.load(ROOT / "results")}


def tables():
    """The tables of the page: a mapping from the first cell of a row to the others by the name of their column."""
    made = []
    for block in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines())
        made.append({row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows})
    return made


ACCURACIES, PAPERS, DIFFERENCES, SETTINGS = tables()


@pytest.mark.parametrize("name", ACCURACIES)
def test_accuracies(name, found):
    one = found[NAMES[name]]
    rows = {row.method: row for row in one.rows}
    for title, cell in ACCURACIES[name].items():
        method = METHODS[title]
        assert cell == rows[method].shown.replace("%", "")
        assert PAPERS[name][title] == f"{one.paper[method]:.2f}"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences(name, found):
    rows = {row.method: row for row in found[NAMES[name]].rows}
    for title, cell in DIFFERENCES[name].items():
        if not cell:
            assert METHODS[title] not in rows
            continue
        row, plain = rows[METHODS[title]], cell.replace("−", "-")
        wide = re.fullmatch(r"±([\d.]+)", plain)
        told = (f"-{wide[1]}", f"+{wide[1]}") if wide else tuple(plain.split(" to "))
        assert told == tuple(f"{100 * end:+.2f}" for end in row.interval)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, found):
    one, told = found[NAMES[name]], SETTINGS[name]
    config, row = one.records[0].config, next(row for row in one.rows if row.method == "dp-psasc")
    assert told["ε, δ"] == f"{config['epsilon']:g}, {config['delta']:.0e}".replace("e-0", "e-")
    assert told["samples, epochs, batch"] == f"{one.records[0].data['train']:,}, {config['epochs']}, {config['batch']}"
    assert told["σ"] == f"{row.noise_multiplier:.4f}" and told["seeds"] == str(len(row.seeds))
    search = next(record.search for record in one.records if record.method == "dp-psasc")
    assert told["tries"] == str(len(search["tries"]))


def test_what_the_text_says_of_all_comparisons(found):
    tested = [row for one in found.values() for row in one.rows if row.p is not None]
    left = [row for row in tested if row.differs]
    assert f"Of {len(tested)} differences to DP-PSASC" in TEXT and len(left) == 1 and left[0].method == "auto-s"
    assert f"{abs(100 * left[0].difference):.2f} points" in TEXT
    star = next(row for row in found["mnist"].rows if row.method == "dp-psasc-star")
    assert f"DP-PSASC\\*'s {100 * star.difference:.2f} on MNIST" in TEXT and f"(p = {star.p_holm:.2f})" in TEXT
    (ceiling,) = (row for row in found["cifar10-simclr"].rows if row.method == "non-private")
    assert f"{100 * ceiling.accuracy:.2f}%" in TEXT
