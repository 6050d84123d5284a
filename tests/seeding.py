"""Random numbers for tests, on the device that they run on."""

import torch


def seeded(seed: int = 0) -> torch.Generator:
    """A generator on the default device, which ``pytest --device cuda`` sets; torch's own is on the CPU unless told."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
