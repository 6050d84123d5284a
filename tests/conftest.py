"""Settings that every test shares."""

import torch
from hypothesis import HealthCheck, settings

# Deterministic examples: a failure seen once is seen again. No deadline: the machines are noisy.
settings.register_profile(
    "dpscale", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dpscale")
torch.set_num_threads(1)
