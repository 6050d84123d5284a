"""Models of the experiments. None has BatchNorm: it mixes the samples of a batch, which no bound survives."""

from collections.abc import Callable

from torch import nn


def digits_cnn() -> nn.Sequential:
    """A CNN for 8×8 images: two convolutions with GroupNorm and ReLU, and one linear layer; 5,746 parameters.

    Small, because noise is added to every parameter; GroupNorm, because it normalizes within one sample and does
    better in a hundred noisy steps than tanh; no pooling before the linear layer, which cost 4 points.
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 24, 3, stride=2, padding=1),  # 8×8 -> 4×4
        nn.GroupNorm(4, 24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


def paper_cnn() -> nn.Sequential:
    """The paper's CNN for 28×28 images: four convolutions and one linear layer, tanh between.

    The paper gives no widths; these are ours: 30,650 parameters. The first two layers follow its lineage (Tramèr &
    Boneh), padded by one more so that the map stays even.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),  # 28 -> 14
        nn.Tanh(),
        nn.Conv2d(16, 32, 4, stride=2),  # 14 -> 6
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),  # 6 -> 3
        nn.Flatten(),
        nn.Linear(288, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"digits_cnn": digits_cnn, "paper_cnn": paper_cnn}
"""Every model by name."""
