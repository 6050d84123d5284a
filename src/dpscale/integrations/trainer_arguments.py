"""What of `TrainingArguments` a PrivateTrainer takes, turns off or refuses, and where it resumes from."""

import copy
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dpscale.checks import complaint, require
from dpscale.one_call import plan_for
from dpscale.people import people_of
from dpscale.plan import Plan
from dpscale.sampling import Poisson
from dpscale.scaling import Scaling
from dpscale.sources import require_indexed

log = logging.getLogger("dpscale")

STATE, COMPLETE = "private.safetensors", "trainer_state.json"
"""Files of a checkpoint: what the private run needs to go on, and what the Trainer writes last."""

_DRAWN = "the plan draws the batches"
_TURNED_OFF: dict[str, tuple[Any, Any, str]] = {
    "group_by_length": (False, False, _DRAWN),
    "train_sampling_strategy": ("random", "random", _DRAWN),
    "dataloader_drop_last": (False, False, _DRAWN),
    "auto_find_batch_size": (False, False, "a batch that does not fit into memory goes in parts by itself"),
    "include_num_input_tokens_seen": ("no", "no", "exact counts are not private"),
    "max_grad_norm": (0.0, 1.0, "samples are bounded one by one, before the noise; clipping their noisy mean would "
                      "only lower the learning rate"),
    "ignore_data_skip": (True, False, "a resumed run draws afresh"),
}  # fmt: skip
"""Options by name: (what they are set to, what they are if nobody asked, why)."""

_REFUSED = {
    "fp16": "Scaled losses would scale the bound. Use bf16=True.",
    "deepspeed": "Start with torchrun; every rank holds the whole model.",
    "fsdp": "Start with torchrun; every rank holds the whole model. For shards, use dpscale.privatize in a loop.",
    "neftune_noise_alpha": "Its noise depends on how long the other samples of a batch are.",
}
"""Options that cannot be private here, and what to do."""


def check(args: TrainingArguments, made: type, data: Any, held_out: Any) -> None:
    """Refuse what cannot be private, or would be left out without a word."""
    for name, action in _REFUSED.items():
        require(not getattr(args, name, None), "PrivateTrainer", f"args.{name}", "left out", getattr(args, name, None),
                action)  # fmt: skip
    require(args.n_gpu <= 1, "PrivateTrainer", "args", "for one GPU per process", f"{args.n_gpu} of them",
            "Start with torchrun, or set CUDA_VISIBLE_DEVICES.")  # fmt: skip
    by_accelerate = (args.accelerator_config.gradient_accumulation_kwargs or {}).get("num_steps", 1)
    require(by_accelerate == 1, "PrivateTrainer", "args.accelerator_config", "without gradient accumulation",
            by_accelerate, "Set gradient_accumulation_steps, which goes by micro-batches.")  # fmt: skip
    own = [n for n in ("compute_loss", "_get_train_sampler") if getattr(made, n) is not getattr(Trainer, n)]
    require(not own, "PrivateTrainer", "class", f"without {', '.join(own)} of its own", made.__name__, "For a loss, "
            "pass compute_loss_func, which gives one loss per sample; samples are drawn by the plan.")  # fmt: skip
    require_indexed("PrivateTrainer", data, "train_dataset")
    if held_out is data:
        log.warning("dpscale: evaluation on the training data gives exact numbers, which ε does not cover.")


def planned(
    args: TrainingArguments, data: Any, epsilon: float | None, delta: float | None, scaling: Scaling | None,
    plan: Plan | None,
) -> Plan:  # fmt: skip
    """The plan that was given, or that of the arguments. Where the data are people, it says so."""
    people = people_of(data)
    if plan is not None:
        require(epsilon is None and scaling is None, "PrivateTrainer", "plan", "given alone",
                "epsilon or scaling beside it", "The plan has both.")  # fmt: skip
        return plan if people is None or plan.records is not None else replace(plan, records=people.records)
    if epsilon is None or delta is None:
        raise complaint("PrivateTrainer", "epsilon", "given, and delta, or plan in their place", (epsilon, delta))
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    sampling = Poisson(size=len(data), batch=batch)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampling.steps(1))
    records = None if people is None else people.records
    return plan_for(sampling, epsilon=epsilon, delta=delta, scaling=scaling, steps=steps, records=records)


def settled(args: TrainingArguments, plan: Plan) -> TrainingArguments:
    """A copy under which the Trainer makes one step per draw, as often as planned, and touches no gradient."""
    require(plan.steps is not None and args.max_steps <= plan.steps, "PrivateTrainer", "args.max_steps",
            f"at most the {plan.steps} steps of the plan", args.max_steps)  # fmt: skip
    own = copy.copy(args)
    for name, (off, usual, why) in _TURNED_OFF.items():
        if (value := getattr(args, name, None)) and value not in (off, usual):
            log.warning("dpscale: %s=%r has no effect in a PrivateTrainer: %s.", name, value, why)
        setattr(own, name, off if isinstance(value, type(off)) else False)  # before version 5, "no" was False
    own.max_steps = args.max_steps if args.max_steps > 0 else plan.steps
    own.gradient_accumulation_steps = 1
    own.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"  # of which torch warns
    own.per_device_train_batch_size = math.ceil(plan.expected_batch / args.world_size)
    return own


def found(asked: str | bool | None, output: Path) -> Path | None:
    """The checkpoint to resume from."""
    if not asked:
        return None
    folders = [Path(asked)] if isinstance(asked, str) else sorted(
        output.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"), key=lambda folder: int(folder.name.rpartition("-")[2])
    )  # fmt: skip
    whole = [folder for folder in folders if all((folder / name).is_file() for name in (STATE, COMPLETE))]
    require(bool(whole), "train", "resume_from_checkpoint", "a checkpoint that a PrivateTrainer wrote", str(asked),
            f"One that was written whole holds {STATE} and {COMPLETE}: without them nobody knows its ε.")  # fmt: skip
    return whole[-1]
