"""Scattering coefficients of images (Mallat, 2012; Bruna & Mallat, 2013): fixed features, computed without data.

An image is convolved with Morlet wavelets of J scales and L angles, the modulus is taken, once more with those of
coarser scales, and each of these maps is averaged by a Gaussian of width 2^J and kept at every 2^J-th pixel: for J = 2,
L = 8 and 28×28 pixels 1 + 16 + 64 = 81 maps of 7×7. Wavelets, padding and order are those of kymatio 0.3.0, which drops
pixels between the layers too; its coefficients are within 1% of these (norm over a batch of images, each order). Its
module for torch does not import beside SciPy 1.17, so this is ours.
"""

import dataclasses
import math

import torch
from torch import Tensor

from dpscale.lab.data import Data

SCATTERING = "scattering"
"""Its name as an encoder."""

SHAPE = (81, 7, 7)
"""Of the features of an image of 28×28 pixels."""


def scattered(data: Data) -> Data:
    """``data`` with the scattering coefficients of its grey images, float16, in place of them.

    Each row is a fixed function of its own image, with no data behind it: this costs no privacy.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scatter = Scattering(data.train_images.shape[-1], device=device)

    def rows(images: Tensor) -> Tensor:
        return torch.cat([scatter(part.to(device).float()[:, 0] / 255).half().cpu() for part in images.split(200)])

    return dataclasses.replace(
        data,
        name=f"{data.name}, scattering features",
        train_images=rows(data.train_images),
        test_images=rows(data.test_images),
        provenance={**data.provenance, "features": {"encoder": SCATTERING, "J": 2, "L": 8, "dtype": "float16"}},
    )


class Scattering:
    """Maps (B, H, W) in [0, 1] to (B, maps, H / 2^J, W / 2^J); H and W are multiples of 2^J."""

    def __init__(self, size: int = 28, J: int = 2, L: int = 8, device: str | torch.device = "cpu") -> None:
        self.J, self.pad = J, 2**J
        n = size + 2 * self.pad
        wave = torch.stack([_wavelet(n, j, theta, L) for j in range(J) for theta in range(L)])
        self.scale = [j for j in range(J) for _ in range(L)]
        self.psi = torch.fft.fft2(wave).real.float().to(device)
        self.phi = torch.fft.fft2(_gabor(n, 0.8 * 2 ** (J - 1), 0.0, 0.0, 1.0)).real.float().to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """The maps of order 0, then those of order 1, then of order 2."""
        x = torch.nn.functional.pad(x[:, None], (self.pad,) * 4, mode="reflect")
        first = torch.fft.ifft2(torch.fft.fft2(x) * self.psi).abs()  # (B, JL, n, n)
        spectrum = torch.fft.fft2(first)
        deeper = []
        for a, j in enumerate(self.scale):
            later = [b for b, other in enumerate(self.scale) if other > j]
            if later:
                deeper.append(torch.fft.ifft2(spectrum[:, a : a + 1] * self.psi[later]).abs())
        every = torch.cat([x, first, *deeper], 1)
        smooth: Tensor = torch.fft.ifft2(torch.fft.fft2(every) * self.phi).real
        step = 2**self.J
        return smooth[..., ::step, ::step][..., 1:-1, 1:-1].contiguous()


def _gabor(n: int, sigma: float, theta: float, xi: float, slant: float) -> Tensor:
    """A Gaussian times a plane wave, made periodic."""
    u = torch.arange(-2 * n, 3 * n, dtype=torch.float64)
    x, y = u[:, None], u[None, :]
    along, across = x * math.cos(theta) + y * math.sin(theta), y * math.cos(theta) - x * math.sin(theta)
    envelope = torch.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
    wave = torch.polar(envelope, xi * along) * slant / (2 * math.pi * sigma**2)
    periodic: Tensor = wave.unflatten(0, (5, n)).unflatten(2, (5, n)).sum((0, 2))
    return periodic


def _wavelet(n: int, j: int, theta: int, L: int) -> Tensor:
    """Morlet: a Gabor with so much of its envelope taken away that its mean is 0."""
    sigma, angle, slant = 0.8 * 2**j, (L - L // 2 - 1 - theta) * math.pi / L, 4 / L
    wave = _gabor(n, sigma, angle, 0.75 * math.pi / 2**j, slant)
    envelope = _gabor(n, sigma, angle, 0.0, slant)
    return wave - wave.sum() / envelope.sum() * envelope
