"""The theory page: its simulations, its numbers, and the script in experiments/ that makes it."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import theorems as theory
import theory as script
import theory_figures
from dpscale import PSASC

DOCS = Path(__file__).parent.parent / "docs"
FILE = str(DOCS / "theory.md")
PAGES = (DOCS / "theory.md", DOCS.parent / "results" / "theory-notes.md")


def sample_loss(w, b):
    return (1 - w.cos()).sum() + b @ w


def sample_gradient(w, b):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(sample_loss(w, b), w)[0]


# -- the problem -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skewed", [True, False])
@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_spread_is_tau_at_every_point(tau, skewed):
    b_ND = theory.offsets(tau, 3, skewed=skewed)
    for seed in range(3):
        w = theory.start(seed)
        gradients = torch.stack([sample_gradient(w, b) for b in b_ND])
        w_ = w.clone().requires_grad_()
        full = torch.autograd.grad(theory.objective(w_), w_)[0]
        torch.testing.assert_close(gradients.mean(0), full)
        assert float((gradients - full).square().sum(1).mean()) == pytest.approx(tau**2, rel=1e-12)


def test_objective_is_1_smooth_not_convex_and_at_least_0():
    w = torch.linspace(-10, 10, 4001, dtype=torch.float64)[:, None]
    w.requires_grad_()
    (slope,) = torch.autograd.grad(theory.objective(w).sum(), w, create_graph=True)
    (hessian,) = torch.autograd.grad(slope.sum(), w)  # its diagonal, and all of it: coordinates are separate
    assert 0.999 < hessian.max() <= 1 and -1 <= hessian.min() < -0.999
    assert 0 <= theory.objective(w).min() < 1e-5


def test_symmetric_offsets_come_in_pairs_and_rest_where_the_gradient_is_zero():
    b_ND = theory.offsets(1.0, 0, skewed=False)
    torch.testing.assert_close(b_ND[: theory.SAMPLES // 2], -b_ND[theory.SAMPLES // 2 :])
    assert float(theory.resting_gradient(b_ND[None], PSASC(s=0.5, r=1e-3))) < 1e-12


def test_resting_gradient_tends_to_the_geometric_median():
    b_ND = theory.offsets(1.0, 0)
    median = torch.zeros(theory.PARAMETERS, dtype=torch.float64)
    for _ in range(3000):
        weight = 1 / (median - b_ND).norm(dim=1)
        median = (weight[:, None] * b_ND).sum(0) / weight.sum()
    rests = float(theory.resting_gradient(b_ND[None], PSASC(s=1.0, r=1e-9)))
    assert rests == pytest.approx(float(median.norm()), rel=1e-6) and 0.1 < rests < 1


# -- the algorithms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["one-point", "full-batch", "momentum"])
def test_simulation_is_the_algorithm_sample_by_sample(algorithm):
    steps, seeds, sigmas = 6, 2, (0.0, 0.7)
    w_RD = torch.stack([theory.start(k) for k in range(seeds)]).repeat(2, 1)
    offset_RND = torch.stack([theory.offsets(tau, k) for tau in (0.5, 2.0) for k in range(seeds)])
    sigma_R = torch.tensor(sigmas, dtype=torch.float64).repeat_interleave(seeds)
    constants = theory.schedule(algorithm, 100, theory.objective(w_RD), sigma_R, theory.PARAMETERS, beta=1.0)
    batch = theory.BATCH if algorithm == "one-point" else None
    arguments = {"sigma": sigma_R, "batch": batch, "seeds": seeds}
    found = theory.simulate(w_RD, offset_RND, constants, steps, generator=torch.Generator().manual_seed(5), **arguments)

    C, s, r = 1.0, constants.rule.s, constants.rule.r
    for row in range(len(w_RD)):
        generator = torch.Generator().manual_seed(5)
        w, memory, norms = w_RD[row], {}, []
        for _ in range(steps):
            norms.append(float(w.sin().norm()))
            chosen = range(theory.SAMPLES)
            if batch is not None:
                drawn = torch.rand(seeds, theory.SAMPLES, generator=generator).topk(batch, dim=1).indices
                chosen = drawn[row % seeds].tolist()
                assert len(set(chosen)) == batch
            noise = torch.randn(seeds, theory.PARAMETERS, generator=generator, dtype=torch.float64)[row % seeds]
            total = torch.zeros(theory.PARAMETERS, dtype=torch.float64)
            for i in chosen:
                g = sample_gradient(w, offset_RND[row, i])
                m = constants.gamma * g + (1 - constants.gamma) * memory.get(i, g) if batch is None else g
                memory[i] = m
                x = float(m.norm())
                total += C / (s * x + r / (x + r)) * m
            total += float(sigma_R[row]) * C / s * noise
            w = w - float(constants.rate[row]) / len(chosen) * total
        torch.testing.assert_close(found.final[row], w, rtol=1e-11, atol=1e-11)
        assert float(found.least[row]) == pytest.approx(min(norms), rel=1e-11)
    assert (constants.gamma < 1) == (algorithm == "momentum")


def test_schedules_are_the_theorems():
    F, sigma = torch.tensor([8.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    one, two = (theory.schedule(name, 10_000, F, sigma, 16, beta=2.0) for name in ("one-point", "momentum"))
    assert (one.rule.s, one.rule.r, one.gamma) == (theory.FIXED_S, pytest.approx(0.01), 1.0)
    assert float(one.rate) == pytest.approx(math.sqrt(2 * theory.FIXED_S**2 * 8 / (2 * 10_000 * 18)))
    assert (two.rule.s, two.rule.r, two.gamma) == (pytest.approx(0.1), pytest.approx(0.01), pytest.approx(0.1))
    longer = theory.schedule("momentum", 160_000, F, sigma, 16, beta=2.0)
    assert float(longer.rate / two.rate) == pytest.approx(16**-0.75)


def test_noise_of_a_budget_grows_with_the_root_of_the_steps():
    budget = theory.Setting(algorithm="momentum", tau=1.0, sigma="budget")
    assert budget.noise(400) / budget.noise(100) == pytest.approx(2, rel=1e-3)
    assert budget.noise(100) > 1


# -- what is measured ------------------------------------------------------------------------------------------


def test_slope_fit_recovers_a_known_slope_and_its_interval_covers():
    lengths, covered = [100, 300, 1000, 3000, 10_000], 0
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(0, 0.2, (5, 8))
        fit = theory.fit_slope(lengths, (7 * np.array(lengths)[:, None] ** -0.25 * np.exp(noise)).tolist())
        assert abs(fit.slope + 0.25) < 0.1
        covered += fit.low <= -0.25 <= fit.high
    assert 178 <= covered <= 199  # 95% of 200; outside by chance once in 1,000 times, were the seeds not fixed
    exact = theory.fit_slope(lengths, [[2 * t**-0.5] * 3 for t in lengths])
    assert exact.text == "-0.50 [-0.50, -0.50]"


def test_counterexample_meets_the_assumptions_and_does_not_converge():
    for ran in theory.counterexample([100, 1000])["runs"]:
        assert ran["norms_that_grew"] == 0  # assumption 2
        assert ran["tau"] == pytest.approx(math.sqrt(2) / 3 * 10)  # assumption 1, at its largest on the path
        assert ran["least"] == pytest.approx(4 / 3) and ran["last"] > ran["least"]


def test_some_norms_grow_on_the_test_problem():
    shares = theory.growing_norms(60, 2)
    assert all(0.05 < share < 0.95 for share in shares.values())


def test_s_identity_holds_to_rounding_and_the_controls_differ():
    gaps = {name: max(values) for name, values in theory.s_identity(40)["distance"].items()}
    assert gaps["twin: SGD, float64"] < 1e-14 and gaps["twin: heavy ball 0.9, float64"] < 1e-13
    assert 1e-9 < gaps["twin: SGD, float32"] < 1e-5
    assert 1e-7 < gaps["PSAC at η/s: SGD, float64"] < gaps["PSAC at η: SGD, float64"]


def test_peaks_lie_where_the_formula_says():
    for rule in theory.curves()["rules"].values():
        assert rule["peak_weight_on_grid"] <= rule["peak_weight"] * (1 + 1e-12)
        assert rule["peak_weight_on_grid"] > 0.9 * rule["peak_weight"]
        if rule["peak_norm"] > 0:
            assert rule["peak_norm_on_grid"] == pytest.approx(rule["peak_norm"], rel=0.05)


def test_expected_noise_to_signal_is_never_below_psacs():
    found = theory.noise_to_signal(dimension=4)
    for s, ratios in found["over_psac"].items():
        for values in ratios.values():
            assert min(values) >= 1
        assert max(ratios["as printed"]) < 1 / float(s)


def test_expected_noise_to_signal_agrees_with_sampling():
    found = theory.noise_to_signal(dimension=4)
    place = 25  # a median of about 0.3
    generator = torch.Generator().manual_seed(0)
    x = found["median"][place] * torch.randn(400_000, generator=generator, dtype=torch.float64).exp()
    rule = PSASC(C=1.0, s=1.0, r=found["r"])
    g = torch.zeros(len(x), 4, dtype=torch.float64)
    g[:, 0] = x * rule.weight(x)
    n = torch.randn(len(x), 4, generator=generator, dtype=torch.float64)
    length = n.norm(dim=1).mean()
    sampled = {"as printed": (length / g[:, 0]).mean(), "sum": length / g[:, 0].mean()}
    for name, value in sampled.items():
        assert found["psac"][name][place] == pytest.approx(float(value), rel=0.02)
    # E over x of 1 / E over n: norms near 1 after scaling, so the mean over both is close to it.
    assert found["psac"]["noisy gradient"][place] == pytest.approx(float(length / (g + n).norm(dim=1).mean()), rel=0.01)


# -- the script ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("theory") / "new" / "folder"
    command = [sys.executable, "experiments/theory.py", "--quick", "--seeds", "2", "--out", str(out)]
    return out, subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True)


def test_script_writes_figures_numbers_and_a_table(quick):
    out, result = quick
    names = {path.name for path in out.iterdir()}
    assert names == {"theory.json", *(f"theory-{name}.png" for name in theory_figures.FIGURES)}
    for name in names - {"theory.json"}:
        assert (out / name).read_bytes().startswith(b"\x89PNG") and (out / name).stat().st_size > 10_000
    found = json.loads((out / "theory.json").read_text(encoding="utf-8"))
    assert found["settings"]["seeds"] == [0, 1] and found["settings"]["quick"] is True
    assert {"dpscale", "torch", "numpy", "python"} <= set(found["versions"]) and found["seconds"] > 0
    assert found["command"].startswith("python experiments/theory.py --quick")
    assert len(found["convergence"]) == len(theory.SETTINGS)
    for row in found["convergence"]:
        assert np.shape(row["least"]) == (len(theory.QUICK_LENGTHS), 2)
        assert row["slope"]["low"] <= row["slope"]["slope"] <= row["slope"]["high"]
        assert theory.Fit(**row["slope"]).text in result.stdout
    assert "8 files in" in result.stdout and "s of processor time" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()[:-1]) <= 80


def test_numbers_repeat_themselves(quick):
    out, _ = quick
    again = theory.compute(2, quick=True)
    before = json.loads((out / "theory.json").read_text(encoding="utf-8"))
    assert theory_figures.rounded(again["convergence"]) == before["convergence"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seeds", "1"], "at least 2 seeds, not 1"),
        (["--seeds", "many"], "invalid"),
        (["--out", FILE], "cannot write"),
    ],
)
def test_bad_input_is_refused_before_the_work(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(theory, "compute", lambda *_, **__: pytest.fail("the work began"))
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)
    assert told in capsys.readouterr().err


def test_pages_quote_the_measured_slopes():
    page, notes = (path.read_text(encoding="utf-8").replace("−", "-") for path in PAGES)
    found = json.loads((DOCS / "figures" / "theory.json").read_text(encoding="utf-8"))
    assert found["settings"]["quick"] is False and len(found["settings"]["seeds"]) >= 10
    slopes = set()
    for row in found["convergence"]:
        slope = theory.Fit(**row["slope"]).text
        slopes.add(slope)
        assert f"{slope} | {theory.Fit(**row['slope_last_decade']).text}" in notes, row["title"]
    quoted = set(re.findall(r"[+-]\d\.\d\d \[[^]]*\]", page))
    assert quoted and quoted <= slopes
    for name in theory_figures.FIGURES:
        figure = f"figures/theory-{name}.png"
        assert figure in page or figure in notes, name
        assert (DOCS / figure).exists()
