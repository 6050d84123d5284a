"""Replaces the layers that no differentially private training can have by ones that treat samples apart."""

from torch import nn

from dpscale.checks import require, require_count
from dpscale.engine.compat import BatchNorm, InstanceNorm, registered


def fix(model: nn.Module, groups: int = 32) -> list[str]:
    """Replace every batch norm of a model, in place, and say what was changed.

    | layer                                          | becomes                                                |
    |------------------------------------------------|--------------------------------------------------------|
    | BatchNorm2d, BatchNorm3d, SyncBatchNorm        | GroupNorm of the same width, up to ``groups`` groups   |
    | BatchNorm1d                                    | GroupNorm with one group: its input may be (B, C), and |
    |                                                | a group of one feature normalizes it away              |
    | InstanceNorm that tracks running statistics    | the same without them: they are taken from the samples |

    Scale and shift are the very parameters of the old layer, so that optimizers, devices, types, frozen parameters and
    tied ones stay as they are. Running statistics are dropped: a pretrained model computes something else afterwards
    and has to be trained again.

    Args:
        model: any module but a batch norm itself.
        groups: the most groups a GroupNorm gets; the number must divide the channels and leave two to a group.

    Returns:
        one line per changed layer: its name, what it was and what it is. Empty if nothing had to be changed.

    Example:
        >>> from torch import nn; from dpscale.model_fix import fix
        >>> model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
        >>> fix(model)
        ['1: BatchNorm2d(48) -> GroupNorm(24, 48)']
    """
    require(isinstance(model, nn.Module), "fix", "model", "a torch.nn.Module", type(model).__name__)
    require_count("fix", "groups", groups)
    require(
        not isinstance(model, BatchNorm), "fix", "model", "a module that contains its batch norms",
        type(model).__name__, "It cannot be replaced in place: build a GroupNorm instead, or wrap it in a Sequential.",
    )  # fmt: skip
    lazy = [n for n, m in model.named_modules() if isinstance(m, BatchNorm) and not m.num_features]
    require(not lazy, "fix", "model", "one whose lazy layers have seen an input", lazy, "Run it on a batch first.")
    changed: list[str] = []
    replaced: dict[nn.Module, nn.GroupNorm] = {}  # a layer that is registered twice stays one layer
    for path, parent in list(model.named_modules()):
        if isinstance(parent, InstanceNorm) and parent.track_running_stats:
            parent.track_running_stats = False
            parent.running_mean = parent.running_var = parent.num_batches_tracked = None
            changed.append(f"{path}: {_text(parent)} -> without running statistics")
        for child_name, child in list(registered(parent)[2].items()):
            if isinstance(child, BatchNorm):
                name = f"{path}.{child_name}" if path else child_name
                replaced[child] = replaced.get(child) or _group_norm(child, groups)
                setattr(parent, child_name, replaced[child])
                changed.append(f"{name}: {_text(child)} -> {_text(replaced[child])}")
    return changed


def fixable(model: nn.Module) -> list[str]:
    """The layers that `fix` would replace, by name."""
    tracking = [n for n, m in model.named_modules() if isinstance(m, InstanceNorm) and m.track_running_stats]
    return [n for n, m in model.named_modules() if isinstance(m, BatchNorm) or n in tracking]


def _group_norm(old: BatchNorm, groups: int) -> nn.GroupNorm:
    channels = old.num_features
    most = 1 if isinstance(old, nn.BatchNorm1d) else max(1, min(groups, channels // 2))
    count = max(d for d in range(1, most + 1) if channels % d == 0)
    new = nn.GroupNorm(count, channels, old.eps, affine=False)
    new.affine = old.affine
    new.weight, new.bias = old.weight, old.bias  # the same parameters
    return new.train(old.training)


def _text(norm: nn.Module) -> str:
    if isinstance(norm, nn.GroupNorm):
        return f"GroupNorm({norm.num_groups}, {norm.num_channels})"
    return f"{type(norm).__name__}({norm.num_features})"
