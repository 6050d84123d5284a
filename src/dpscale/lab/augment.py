"""Random views of images, each row for itself, for a whole batch on its device.

They take images as they are stored: uint8, or floating point in [0, 1]. What a view adds is black, or the image's own.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def crop(x: Tensor, reach: float, random: torch.Generator) -> Tensor:
    """Cut out at a place up to ``reach`` pixels off, the image being continued by its reflection."""
    rows, columns = _moved(x, reach, random)
    return _cut(x, *(end - (end - k.abs()).abs() for k, end in ((rows, x.shape[-2] - 1), (columns, x.shape[-1] - 1))))


def shift(x: Tensor, reach: float, random: torch.Generator) -> Tensor:
    """Moved by up to ``reach`` pixels, black beyond the image."""
    framed = F.pad(x, (1, 1, 1, 1))
    rows, columns = _moved(x, reach, random)
    return _cut(framed, (rows + 1).clamp(0, x.shape[-2] + 1), (columns + 1).clamp(0, x.shape[-1] + 1))


def mirror(x: Tensor, share: float, random: torch.Generator) -> Tensor:
    """Left and right exchanged, in ``share`` of the images."""
    chosen = torch.rand(len(x), generator=random, device=x.device) < share
    return torch.where(chosen[:, None, None, None], x.flip(-1), x)


def rotate(x: Tensor, degrees: float, random: torch.Generator) -> Tensor:
    """Turned by up to so many degrees about its centre, bilinear; the image's edge goes on beyond it."""
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    angle = (torch.rand(len(x), generator=random, device=x.device) * 2 - 1) * math.radians(degrees)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    height, width = x.shape[-2:]
    turn = torch.stack([cos, -sin * height / width, zero, sin * width / height, cos, zero], 1).view(-1, 2, 3)
    grid = F.affine_grid(turn, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


AUGMENT: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "crop": crop, "shift": shift, "mirror": mirror, "rotate": rotate,
}  # fmt: skip
"""Every transform by name: from images, how much of it, and a source of chance."""


def augmented(x: Tensor, amounts: Mapping[str, float], random: torch.Generator) -> Tensor:
    """A random view of each image: the transforms named, in the order of `AUGMENT`."""
    for name in (name for name in AUGMENT if name in amounts):
        x = AUGMENT[name](x, amounts[name], random)
    return x


def stored(batch: tuple[Tensor, ...], count: int, share: float, random: torch.Generator) -> tuple[Tensor, ...]:
    """Views that were made beforehand: of (B, views, *shape) and labels all views, or with ``count`` 1 one of the two,
    the second in ``share`` of the samples; the labels for each."""
    x, labels = batch
    if count < x.shape[1]:
        second = torch.rand(len(x), generator=random, device=x.device) < share
        x = x[torch.arange(len(x), device=x.device), second.long()].unsqueeze(1)
    return x, labels.unsqueeze(1).repeat(1, x.shape[1])


def _moved(x: Tensor, reach: float, random: torch.Generator) -> list[Tensor]:
    """Rows and columns of each image, (N, height) and (N, width), after a move of its own."""
    most = int(reach)
    by = torch.randint(-most, most + 1, (2, len(x), 1), generator=random, device=x.device)
    return [by[k] + torch.arange(x.shape[k - 2], device=x.device) for k in range(2)]


def _cut(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    which = torch.arange(len(x), device=x.device)[:, None, None]
    return x.movedim(1, -1)[which, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
