"""Where the experiments compute. The processes of a comparison find it in the environment."""

import os

import torch

from dpscale.checks import require

_VARIABLE = "DPSCALE_DEVICE"


def name() -> str:
    """As given by ``--device``, else a GPU if torch finds one."""
    return os.environ.get(_VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")


def on_gpu() -> bool:
    """Whether it is a GPU."""
    return name().startswith("cuda")


def use(device: str | None) -> None:
    """Compute there from now on; None: as `name` finds it."""
    if device is not None:
        require_there(device)
        os.environ[_VARIABLE] = device


def require_there(device: str) -> None:
    """Refuse a device that torch does not find."""
    ok = device == "cpu" or (device.split(":")[0] == "cuda" and torch.cuda.is_available())
    must = "cpu, or cuda (cuda:1 …) where torch finds a GPU"
    require(ok, "dpscale", "device", must, device, "Leave it out, or give --device cpu.")


def gpu_name() -> dict[str, str]:
    """The GPU in use, for a record; nothing on the CPU."""
    return {"gpu": torch.cuda.get_device_name(name())} if on_gpu() else {}
