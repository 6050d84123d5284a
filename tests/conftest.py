"""Settings that every test shares."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

from .remembered import remember_rdp

# Deterministic examples: a failure seen once is seen again. No deadline: the machines are noisy.
settings.register_profile(
    "dpscale", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dpscale")
torch.set_num_threads(1)
remember_rdp()


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where models and data of the tests lie: cpu, or cuda")
    parser.addoption("--compiled", action="store_true", help="run what takes torch's compiler an hour, and only that")


def pytest_configure(config):
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))
    config.addinivalue_line("markers", "compiled: only with --compiled (make test-compiled)")


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--compiled")
    chosen = {item: (item.get_closest_marker("compiled") is not None) == wanted for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
    items[:] = [item for item in items if chosen[item]]


def pytest_collection_finish():
    """Trainers of other libraries collect garbage at every turn. What has been imported so far is none."""
    gc.freeze()


@pytest.fixture(autouse=True)
def lstm_in_any_precision(request):
    """oneDNN has no LSTM in bfloat16 on processors without AVX-512, and torch tries none of its own in its place."""
    lacking = "lstm" in request.node.name and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if lacking:  # torch.backends.mkldnn.flags warns of other flags
        torch._C._set_mkldnn_enabled(False)
    yield
    if lacking:
        torch._C._set_mkldnn_enabled(True)


@pytest.fixture(autouse=True)
def seeded():
    """A test's random numbers are its own, whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    """What is said to somebody who waits long depends on how busy the machine is."""
    monkeypatch.setattr("dpscale.engine.phases.SILENCE", 1e6)


@pytest.fixture(scope="session")
def nursery():
    """Where processes of the tests come from."""
    from .processes import Nursery

    found = Nursery()
    yield found
    found.close()


@pytest.fixture
def folder():
    """Of records of a small comparison, which is run once for all tests of a process."""
    from .lab_runs import finished

    return finished()


@pytest.fixture
def found():
    """Its final records."""
    from .lab_runs import chosen

    return chosen()
