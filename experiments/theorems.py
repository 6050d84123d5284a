"""The paper's theorems and inequalities, measured on problems small enough to know everything about.

The test problem has per-sample losses f_i(w) = Σ_j (1 - cos w_j) + ⟨b_i, w⟩ with Σ b_i = 0. Their mean
F(w) = Σ_j (1 - cos w_j) is non-convex, F >= 0 and β = 1. A sample's gradient is sin w + b_i, so its deviation from
∇F is b_i at every w, and the spread of assumption 1 is τ² = mean ‖b_i‖², exactly and everywhere.

Shapes: R = runs side by side, N = samples, B = batch, D = parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from dpscale.plan import Plan
from dpscale.sampling import FullBatch
from dpscale.scaling import PSAC, PSASC, AutoS, Clip, Scaling

SAMPLES, PARAMETERS, BATCH = 128, 16, 32
MINORITY = 0.2  # share of samples in the smaller of the two groups of a skewed problem
FIXED_S = 0.55  # Theorem 2 leaves s free; this is the paper's FashionMNIST value
EPSILON, DELTA = 3.0, 1e-3
SEEDS, QUICK_SEEDS = 12, 3
LENGTHS = tuple(round(10 ** (2 + k / 4)) for k in range(11))  # 10² to 10^4.5, four to a decade
QUICK_LENGTHS = (20, 60, 200)
CURVE_RULES: dict[str, Scaling] = {
    "Clip": Clip(C=0.25),
    "AutoS": AutoS(C=0.25, r=1e-3),
    "PSAC": PSAC(C=0.25, r=1e-3),
    "PSASC, s = 0.55": PSASC(C=0.25, s=0.55, r=1e-3),
}

OnSteps = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One curve of the convergence figures: an algorithm on a problem, under a noise.

    ``algorithm`` is one of

    | name       | what                                                                     |
    |------------|--------------------------------------------------------------------------|
    | one-point  | Algorithm 1, batches without replacement, schedule of Theorem 2          |
    | full-batch | the same with all samples in every step: nothing is sampled              |
    | momentum   | Algorithm 2, schedule of Theorem 3                                       |
    | unscaled   | Algorithm 1 with weight 1 for every sample: plain SGD                    |

    ``sigma`` is the noise multiplier; ``"budget"`` calibrates it for each T to (`EPSILON`, `DELTA`).
    """

    algorithm: str
    tau: float
    skewed: bool = True
    sigma: float | str = 0.0

    @property
    def title(self) -> str:
        """A line for tables and legends."""
        names = {
            "one-point": f"Algorithm 1, B = {BATCH}",
            "full-batch": "Algorithm 1, B = N",
            "momentum": "Algorithm 2",
            "unscaled": f"SGD without scaling, B = {BATCH}",
        }
        noise = f"ε = {EPSILON:g}" if isinstance(self.sigma, str) else f"σ = {self.sigma:g}"
        return f"{names[self.algorithm]}, τ = {self.tau:g}, {'skewed' if self.skewed else 'symmetric'}, {noise}"

    def noise(self, steps: int) -> float:
        """The noise multiplier of a run of ``steps`` steps."""
        if not isinstance(self.sigma, str):
            return self.sigma
        plan = Plan(scaling=Clip(C=1.0), sampling=FullBatch(size=SAMPLES), steps=steps)
        return float(plan.calibrate(epsilon=EPSILON, delta=DELTA).noise_multiplier or 0.0)


SETTINGS = (
    *(Setting(algorithm="one-point", tau=tau, sigma=sigma) for sigma in (0.0, 1.0) for tau in (0.5, 1.0, 2.0)),
    *(Setting(algorithm="one-point", tau=1.0, skewed=False, sigma=sigma) for sigma in (0.0, 1.0)),
    *(Setting(algorithm="momentum", tau=tau, sigma=sigma) for sigma in (0.0, 1.0) for tau in (0.5, 1.0, 2.0)),
    Setting(algorithm="momentum", tau=1.0, skewed=False, sigma=1.0),
    Setting(algorithm="momentum", tau=1.0, sigma="budget"),
    Setting(algorithm="full-batch", tau=1.0),
    Setting(algorithm="unscaled", tau=1.0),
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The constants of a run of T steps; ``rate`` has one entry per run."""

    rule: Scaling
    gamma: float
    rate: Tensor


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Slope of log y against log T: mean over seeds, and Student's 95% interval of the per-seed slopes."""

    slope: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """As tables print it."""
        return f"{self.slope:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


# -- the problem -----------------------------------------------------------------------------------------------


def offsets(tau: float, seed: int, *, skewed: bool = True) -> Tensor:
    """The b_i of one problem, (N, D): mean exactly 0, mean square norm exactly τ².

    Half of the spread lies along one direction and half is isotropic. Skewed: a fifth of the samples lie far out on
    one side, the rest nearer on the other. Symmetric: with every b_i comes -b_i.
    """
    generator = np.random.default_rng([1, seed])
    direction = generator.standard_normal(PARAMETERS)
    direction /= np.linalg.norm(direction)
    cloud = generator.standard_normal((SAMPLES, PARAMETERS)) / math.sqrt(PARAMETERS)
    if skewed:
        small = np.arange(SAMPLES) < round(MINORITY * SAMPLES)
        along = np.where(small, math.sqrt((1 - MINORITY) / MINORITY), -math.sqrt(MINORITY / (1 - MINORITY)))
    else:
        along = np.where(np.arange(SAMPLES) < SAMPLES // 2, 1.0, -1.0)
        cloud[SAMPLES // 2 :] = -cloud[: SAMPLES // 2]
    found = along[:, None] * direction + cloud
    found -= found.mean(0)
    return torch.from_numpy(tau * found / math.sqrt((found**2).sum(1).mean()))


def start(seed: int) -> Tensor:
    """w_0 of a seed, uniform in [-π, π]^D."""
    return torch.from_numpy(np.random.default_rng([2, seed]).uniform(-math.pi, math.pi, PARAMETERS))


def objective(w: Tensor) -> Tensor:
    """F(w) = Σ_j (1 - cos w_j); the last dimension is summed."""
    return (1 - w.cos()).sum(-1)


# -- the algorithms --------------------------------------------------------------------------------------------


def schedule(algorithm: str, steps: int, start_value: Tensor, sigma: Tensor, dimension: int, beta: float) -> Schedule:
    """η, r, s and γ of Theorems 2 and 3 with every constant behind an O(·) set to 1, and C = 1.

    Theorem 2 gives η = s·√(2F(w_0)/(β·T·(2 + σ²d))), with k̂ = 0. At the s = T^(-1/4) of Theorem 3 that is
    O(T^(-3/4)), which is what Theorem 3 asks for, so one formula serves both.
    """
    momentum = algorithm == "momentum"
    s = steps**-0.25 if momentum else FIXED_S
    rate = (2 * start_value / (beta * steps * (2 + sigma**2 * dimension))).sqrt()
    if algorithm == "unscaled":
        return Schedule(rule=Clip(C=math.inf), gamma=1.0, rate=rate)
    rule = PSASC(C=1.0, s=s, r=steps**-0.5)
    return Schedule(rule=rule, gamma=steps**-0.25 if momentum else 1.0, rate=s * rate)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What runs side by side leave: per run, min_k ‖∇F(w_k)‖, its mean over the last tenth, and the last w."""

    least: Tensor
    late: Tensor
    final: Tensor


def simulate(
    w_RD: Tensor,
    offset_RND: Tensor,
    constants: Schedule,
    steps: int,
    *,
    sigma: Tensor,
    batch: int | None,
    seeds: int,
    generator: torch.Generator,
    on_step: Callable[[], None] = lambda: None,
) -> Runs:
    """Algorithm 1 (γ = 1; all samples if ``batch`` is None) or Algorithm 2 (γ < 1), corrected, for R runs at once.

    For k = 0..T-1: g_i = ∇f_i(w_k); m_i = γ g_i + (1-γ) m_i, from m_i = g_i at k = 0;
    w_{k+1} = w_k - (η/B)(Σ_i w(‖m_i‖) m_i + N(0, (σ·bound)² I)). Runs are ordered setting by setting; runs of one
    seed share batches and noise draws.
    """
    runs, samples, width = offset_RND.shape
    w_RD, copies = w_RD.clone(), runs // seeds
    rule, rate_R1 = constants.rule, constants.rate[:, None] / (batch or samples)
    noise_R1 = sigma[:, None] * rule.bound if bool(sigma.any()) else None
    least_R, late_R, tail = torch.full((runs,), math.inf, dtype=torch.float64), torch.zeros(runs).double(), steps // 10
    average_RND = gradient_RND = torch.empty_like(offset_RND)
    for k in range(steps):
        mean_RD = w_RD.sin()
        norm_R = torch.linalg.vector_norm(mean_RD, dim=-1)
        least_R = torch.minimum(least_R, norm_R)
        if k >= steps - tail:
            late_R += norm_R / tail
        if batch is None:
            torch.add(mean_RD[:, None], offset_RND, out=gradient_RND)
            if constants.gamma == 1 or k == 0:
                average_RND = gradient_RND.clone() if constants.gamma != 1 else gradient_RND
            else:
                average_RND.lerp_(gradient_RND, constants.gamma)
        else:
            drawn = torch.rand(seeds, samples, generator=generator).topk(batch, dim=1).indices.repeat(copies, 1)
            average_RND = mean_RD[:, None] + offset_RND.gather(1, drawn[..., None].expand(-1, -1, width))
        weight_RN = rule.weight(torch.linalg.vector_norm(average_RND, dim=-1))
        sum_RD = torch.bmm(weight_RN[:, None], average_RND)[:, 0]
        if noise_R1 is not None:
            drawn_noise = torch.randn(seeds, width, generator=generator, dtype=torch.float64)
            sum_RD = sum_RD + noise_R1 * drawn_noise.repeat(copies, 1)
        w_RD = w_RD - rate_R1 * sum_RD
        on_step()
    return Runs(least=least_R, late=late_R, final=w_RD)


def resting_gradient(offset_RND: Tensor, rule: Scaling) -> Tensor:
    """‖∇F‖ where the scaled sum is zero, per run: the g = ∇F with Σ_i w(‖g + b_i‖)(g + b_i) = 0.

    An algorithm with this rule comes to rest only where that sum is zero; of several such g, this is the one found
    from g = 0. For r/s -> 0 the rule normalizes, and -g is the geometric median of the b_i, while ∇F = 0 asks for
    their mean.
    """
    g_RD = torch.zeros_like(offset_RND[:, 0])
    for _ in range(10_000):  # a damped fixed-point iteration, Weiszfeld's where the weight is 1/x
        weight_RN = rule.weight(torch.linalg.vector_norm(g_RD[:, None] + offset_RND, dim=-1))
        next_RD = -torch.bmm(weight_RN[:, None], offset_RND)[:, 0] / weight_RN.sum(1, keepdim=True)
        moved = float((next_RD - g_RD).abs().max())
        g_RD = (g_RD + next_RD) / 2
        if moved < 1e-12:
            break
    found: Tensor = torch.linalg.vector_norm(g_RD, dim=-1)
    return found


# -- what is measured ------------------------------------------------------------------------------------------


def fit_slope(lengths: Sequence[int], values: Sequence[Sequence[float]]) -> Fit:
    """Least-squares slope of log y against log T for each seed (a column of ``values``), then mean and interval."""
    slopes = np.polyfit(np.log(lengths), np.log(np.asarray(values)), 1)[0]
    mean, half = float(slopes.mean()), float(stats.t.ppf(0.975, len(slopes) - 1) * stats.sem(slopes))
    return Fit(slope=mean, low=mean - half, high=mean + half)


def convergence(seeds: int, lengths: Sequence[int], on_steps: OnSteps) -> list[dict[str, Any]]:
    """Every setting at every T: per-seed min and late gradient norms, resting gradients, slopes."""
    groups = {
        name: [x for x in SETTINGS if x.algorithm == name] for name in dict.fromkeys(x.algorithm for x in SETTINGS)
    }
    rows = {x: _row(x) for x in SETTINGS}
    total, done = len(groups) * sum(lengths), 0
    w_SD = torch.stack([start(seed) for seed in range(seeds)])
    for number, (algorithm, members) in enumerate(groups.items()):
        offset_RND = torch.cat(
            [torch.stack([offsets(x.tau, seed, skewed=x.skewed) for seed in range(seeds)]) for x in members]
        )
        w_RD = w_SD.repeat(len(members), 1)
        for steps in lengths:
            sigmas = [x.noise(steps) for x in members]
            sigma_R = torch.tensor(sigmas, dtype=torch.float64).repeat_interleave(seeds)
            constants = schedule(algorithm, steps, objective(w_RD), sigma_R, PARAMETERS, beta=1.0)

            def told(state: str = f"{algorithm}, T = {steps:,}") -> None:
                nonlocal done
                done += 1
                on_steps(done, total, state)

            generator = torch.Generator().manual_seed(1000 * number + lengths.index(steps))
            batch = BATCH if algorithm in ("one-point", "unscaled") else None
            runs = simulate(
                w_RD,
                offset_RND,
                constants,
                steps,
                sigma=sigma_R,
                batch=batch,
                seeds=seeds,
                generator=generator,
                on_step=told,
            )
            rest_R = resting_gradient(offset_RND, constants.rule)
            for k, x in enumerate(members):
                own = slice(k * seeds, (k + 1) * seeds)
                row = rows[x]
                row["noise_multiplier"].append(sigmas[k])
                row["rate"].append(float(constants.rate[own].mean()))
                for name, values in (("least", runs.least), ("late", runs.late), ("resting", rest_R)):
                    row[name].append(values[own].tolist())
    tail = [k for k, steps in enumerate(lengths) if steps * 10 >= lengths[-1]]
    for row in rows.values():
        row["slope"] = asdict(fit_slope(lengths, row["least"]))
        row["slope_last_decade"] = asdict(fit_slope([lengths[k] for k in tail], [row["least"][k] for k in tail]))
    return list(rows.values())


def _row(x: Setting) -> dict[str, Any]:
    lists: dict[str, Any] = {name: [] for name in ("noise_multiplier", "rate", "least", "late", "resting")}
    return {"title": x.title, **asdict(x), **lists}


def counterexample(lengths: Sequence[int]) -> dict[str, Any]:
    """Three samples, one parameter, no noise, no sampling: every assumption holds, and ‖∇F‖ does not fall.

    f_1 = f_2 = w²/2 and f_3 = -c·w with c = 8, so F = (w - c/2)²/3 up to a constant and β = 2/3. From w_0 = c/4
    both algorithms walk away from the minimum at c/2 towards 0, because two normalized gradients outvote one. Norms
    |w|, |w|, c never grow.
    """
    c, found = 8.0, []
    w_0 = torch.tensor(c / 4, dtype=torch.float64)
    for algorithm in ("full-batch", "momentum"):
        for steps in lengths:
            value, nothing = ((w_0 - c / 2) ** 2 / 3)[None], torch.zeros(1, dtype=torch.float64)
            constants = schedule(algorithm, steps, value, nothing, dimension=1, beta=2 / 3)
            # Theorem 3 leaves the constant of η free; a tenth keeps the momentum from overshooting.
            rate = float(constants.rate) * (0.1 if algorithm == "momentum" else 1.0)
            w, path = w_0.clone(), [float(w_0)]
            average: Tensor | None = None
            for _ in range(steps):
                g = torch.stack([w, w, torch.full_like(w, -c)])
                average = g if average is None else average + constants.gamma * (g - average)
                w = w - rate / 3 * (constants.rule.weight(average.abs()) * average).sum()
                path.append(float(w))
            visited = np.array(path[:-1])
            found.append(
                {
                    "algorithm": algorithm,
                    "steps": steps,
                    "least": float(np.abs(2 * visited - c).min() / 3),
                    "last": float(abs(2 * visited[-1] - c) / 3),
                    "norms_that_grew": int((np.diff(np.abs(visited)) > 0).sum()),
                    "tau": float(math.sqrt(2) / 3 * (visited.max() + c)),
                    "path": path[:: max(1, steps // 200)],
                }
            )
    return {"c": c, "start": float(w_0), "beta": 2 / 3, "momentum_rate_factor": 0.1, "runs": found}


def growing_norms(steps: int, seeds: int) -> dict[str, float]:
    """Share of (step, sample) pairs in which a sample's gradient norm grows, against assumption 2, by τ."""
    shares = {}
    for tau in (0.5, 1.0, 2.0):
        w_RD = torch.stack([start(seed) for seed in range(seeds)])
        offset_RND = torch.stack([offsets(tau, seed) for seed in range(seeds)])
        sigma = torch.zeros(seeds, dtype=torch.float64)
        constants = schedule("momentum", steps, objective(w_RD), sigma, PARAMETERS, beta=1.0)
        grew, before = 0, torch.full(offset_RND.shape[:2], math.inf, dtype=torch.float64)
        average = w_RD.sin()[:, None] + offset_RND
        for _ in range(steps):
            gradient = w_RD.sin()[:, None] + offset_RND
            norms = torch.linalg.vector_norm(gradient, dim=-1)
            grew += int((norms > before * (1 + 1e-12)).sum())
            before, average = norms, torch.lerp(average, gradient, constants.gamma)
            weight = constants.rule.weight(torch.linalg.vector_norm(average, dim=-1))
            w_RD = w_RD - constants.rate[:, None] / SAMPLES * torch.bmm(weight[:, None], average)[:, 0]
        shares[f"{tau:g}"] = grew / ((steps - 1) * before.numel())
    return shares


def curves() -> dict[str, Any]:
    """Weights and signal per unit of noise of the four rules, their peaks, and PSASC's signal over PSAC's by s."""
    x = torch.logspace(-4, 1.5, 300, dtype=torch.float64)
    psac = PSAC(C=1.0, r=1e-3)
    ratios = {}
    for s in (0.9, 0.55, 0.3):
        rule = PSASC(C=1.0, s=s, r=1e-3)
        ratios[f"{s:g}"] = (rule.weight(x) / rule.bound / psac.weight(x)).tolist()
    rules = {
        name: {
            "constants": asdict(rule),
            "bound": rule.bound,
            "peak_norm": rule.peak_norm,
            "peak_weight": rule.peak_weight,
            "peak_norm_on_grid": float(x[rule.weight(x).argmax()]),
            "peak_weight_on_grid": float(rule.weight(x).max()),
            "weight": rule.weight(x).tolist(),
            "signal": (x * rule.weight(x) / rule.bound).tolist(),
        }
        for name, rule in CURVE_RULES.items()
    }
    return {"norm": x.tolist(), "rules": rules, "signal_over_psac": ratios}


def s_identity(steps: int) -> dict[str, Any]:
    """Distance between a PSASC run and others with the same batches and noise, ‖w - w'‖/‖w‖ after each step.

    Its twin has bound 1, the weight 1/(x + (r/s)/(x+r)) and learning rate ηC/s. The two controls are PSAC at η/s,
    which differs in the stabiliser alone, and PSAC at η.
    """
    C, s, r, rate, sigma = 0.25, 0.55, 1e-3, 0.5, 1.0
    psasc, psac = PSASC(C=C, s=s, r=r), PSAC(C=C, r=r)

    def run(
        weight: Callable[[Tensor], Tensor], bound: float, rate: float, momentum: float, dtype: torch.dtype
    ) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        b_ND, w_D = offsets(1.0, 0).to(dtype), start(0).to(dtype)
        velocity, path = torch.zeros_like(w_D), []
        for _ in range(steps):
            drawn = torch.rand(SAMPLES, generator=generator).topk(BATCH).indices
            g_BD = w_D.sin() + b_ND[drawn]
            noise_D = torch.randn(PARAMETERS, generator=generator, dtype=torch.float64).to(dtype)
            released_D = (weight(g_BD.norm(dim=-1))[:, None] * g_BD).sum(0) + sigma * bound * noise_D
            velocity = momentum * velocity + released_D / BATCH
            w_D = w_D - rate * velocity
            path.append(w_D.double())
        return torch.stack(path)

    def twin(x: Tensor) -> Tensor:
        return 1 / (x + (r / s) / (x + r))

    found = {}
    for name, momentum, dtype in (
        ("SGD, float64", 0.0, torch.float64),
        ("heavy ball 0.9, float64", 0.9, torch.float64),
        ("SGD, float32", 0.0, torch.float32),
    ):
        path = run(psasc.weight, psasc.bound, rate, momentum, dtype)
        others = {"twin": run(twin, 1.0, rate * C / s, momentum, dtype)}
        if dtype is torch.float64 and momentum == 0:
            others["PSAC at η/s"] = run(psac.weight, psac.bound, rate / s, momentum, dtype)
            others["PSAC at η"] = run(psac.weight, psac.bound, rate, momentum, dtype)
        for other, its in others.items():
            gap = torch.linalg.vector_norm(path - its, dim=-1) / torch.linalg.vector_norm(path, dim=-1)
            found[f"{other}: {name}"] = gap.tolist()
    return {"C": C, "s": s, "r": r, "rate": rate, "sigma": sigma, "steps": steps, "distance": found}


def noise_to_signal(dimension: int = 100, r: float = 1e-3, sigma: float = 1.0) -> dict[str, Any]:
    """Eq. 7 in expectation over lognormal norms: PSASC's noise-to-signal ratio over PSAC's, by the median norm.

    | name          | ratio of noise to signal                                                                      |
    |---------------|-----------------------------------------------------------------------------------------------|
    | as printed    | E_x[E‖n‖ / ‖g̃‖], g̃ the scaled gradient before noise                                          |
    | noisy gradient| E_x[E‖n‖ / E‖g̃ + n‖]: the denominator that the paper's text names                            |
    | sum           | E‖n‖ / E_x‖g̃‖: what a batch of gradients that point one way is worth                        |
    """
    nodes, mass = np.polynomial.hermite_e.hermegauss(120)
    mass = mass / mass.sum()
    medians = np.logspace(-3, 1, 41)
    x = torch.from_numpy(medians[:, None] * np.exp(nodes))  # lognormal with log-deviation 1, by quadrature
    length = sigma * math.sqrt(2) * math.exp(special.gammaln((dimension + 1) / 2) - special.gammaln(dimension / 2))

    def ratios(rule: Scaling) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        signal = (x * rule.weight(x) / rule.bound).numpy()  # in units of the bound, as the noise is
        noisy = length * special.hyp1f1(-0.5, dimension / 2, -((signal / sigma) ** 2) / 2)
        return {
            "as printed": (length / signal) @ mass,
            "noisy gradient": (length / noisy) @ mass,
            "sum": length / (signal @ mass),
        }

    base, found = ratios(PSAC(C=1.0, r=r)), {}
    for s in (0.9, 0.55, 0.3):
        own = ratios(PSASC(C=1.0, s=s, r=r))
        found[f"{s:g}"] = {name: (own[name] / base[name]).tolist() for name in base}
    plain = {name: values.tolist() for name, values in base.items()}
    return {
        "median": medians.tolist(),
        "dimension": dimension,
        "r": r,
        "sigma": sigma,
        "psac": plain,
        "over_psac": found,
    }


def compute(seeds: int, *, quick: bool = False, on_steps: OnSteps = lambda *_: None) -> dict[str, Any]:
    """Every number of the page; ``quick`` takes short runs, to try the chain rather than the theorems."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    constants = {
        "samples": SAMPLES,
        "parameters": PARAMETERS,
        "batch": BATCH,
        "minority": MINORITY,
        "fixed_s": FIXED_S,
        "beta": 1.0,
        "epsilon": EPSILON,
        "delta": DELTA,
        "lengths": list(lengths),
        "seeds": list(range(seeds)),
        "quick": quick,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the operations are small: a second thread costs more than it brings
    try:
        return {
            "settings": constants,
            "curves": curves(),
            "s_identity": s_identity(20 if quick else 500),
            "noise_to_signal": noise_to_signal(),
            "convergence": convergence(seeds, lengths, on_steps),
            "growing_norms": growing_norms(50 if quick else 1000, seeds),
            "counterexample": counterexample(lengths),
        }
    finally:
        torch.set_num_threads(threads)
