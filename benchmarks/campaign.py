"""What a page of measurements on one GPU shows, the most important first: `python benchmarks/loop.py --campaign`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Every model at every precision; these contenders side by side, in the rounds and steps that the flags ask for."""

    models: tuple[str, ...]
    precisions: tuple[str, ...]
    contenders: tuple[str, ...]
    flags: tuple[str, ...] = ()


STEP = ("plain compiled", "step")
OTHERS = ("plain compiled", "Opacus hooks", "Opacus ghost", "vmap")
FEW = ("--rounds", "3", "--steps", "4", "--patience", "1")
SPLIT, WHOLE = ("4-conv-cnn", "resnet9-64"), ("vit-s16", "gpt2", "gpt2-lora")
CAMPAIGN = (
    Part(SPLIT, ("tf32",), (*STEP, "step in 4 parts", "backward")),
    Part(WHOLE, ("tf32",), (*STEP, "backward")),
    Part(SPLIT, ("bf16",), (*STEP, "step in 4 parts")),
    Part(WHOLE, ("bf16",), STEP),
    Part((*SPLIT, "vit-s16"), ("tf32",), OTHERS, FEW),
    Part(("gpt2-lora", "gpt2"), ("tf32",), OTHERS[:-1], FEW),
)
"""ResNet9 at 160×160 is not in it: to compile it ahead takes too much of a GPU's memory beside others."""
HELD: dict[str, dict[str, float]] = {
    "resnet9-160": {"tf32": 85, "bf16": 60},
    "resnet9-64": {"tf32": 19, "bf16": 16},
    "gpt2": {"tf32": 24, "bf16": 8},
    "vit-s16": {"tf32": 15, "bf16": 14},
    "gpt2-lora": {"tf32": 13, "bf16": 6},
    "4-conv-cnn": {"tf32": 1, "bf16": 1},
}
"""GiB of a GPU, about, that a step holds in which dpscale looks at the model; others hold a third of it. What turns out
to have lacked memory is compiled again when all others are done. The slowest to compile stands first."""
