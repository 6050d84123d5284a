"""What a step frees stays with the process."""

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from dpscale.engine import Engine

Engine(torch.nn.Linear(1, 1))
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 18) for _ in range(40)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives back what it likes")
def test_memory_of_a_step_is_not_fetched_from_the_system_again():
    """Left to itself, it is fetched in three processes of four: it depends on where their memory lies."""
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    pages = [
        int(subprocess.run([sys.executable, "-c", STEPS], env=plain, capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert max(pages) < 2048, "of 10,240"
