"""Tiny models, texts and arguments for the tests of the integrations with Hugging Face.

In processes of their own they are run by `train`, which saves what came of a run in a folder.
"""

import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

import dpscale
from dpscale.integrations.accelerate import prepare
from dpscale.integrations.transformers import PrivateTrainer

SIZE, BATCH = 60, 12
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY_BERT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 16, "max_position_embeddings": 16}  # fmt: skip


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


class Texts(Dataset):
    """Sentences of 4 to 11 tokens; labels are their tokens, or a class."""

    def __init__(self, tokens=False):
        self.tokens = tokens

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 50, (int(torch.randint(4, 12, (), generator=g)),), generator=g)
        return {"input_ids": ids, "labels": ids if self.tokens else torch.tensor(index % 2)}


def collate(rows):
    """Padded to the longest; padding has no label."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(tensors, value):
        return torch.stack([pad(t, (0, longest - len(t)), value=value) for t in tensors])

    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([torch.ones_like(t) for t in ids], 0),
        "labels": padded(labels, -100) if labels[0].ndim else torch.stack(labels),
    }


def bert(**config):
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**TINY_BERT, **config))


def lora():
    torch.manual_seed(0)
    more = {"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, **more))
    return get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH // world(), "num_train_epochs": 1,
        "learning_rate": 0.01, "logging_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**(settings | changes))


def trainer(folder, model=None, tokens=False, *, changes=None, **options):
    budget = {} if "plan" in options else {"epsilon": 3, "delta": 1e-3}
    return PrivateTrainer(
        model=model or (lora() if tokens else bert()), args=arguments(folder, **changes or {}),
        train_dataset=options.pop("train_dataset", Texts(tokens)), data_collator=collate, **(budget | options),
    )  # fmt: skip


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


class KilledAt(TrainerCallback):
    """As if the machine had lost power in the midst of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


SAVING = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}


def killed(folder):
    trainer(folder / "run", callbacks=[KilledAt(3)], changes=SAVING).train()


def ranks(folder):
    """The same run on any number of ranks: the batch, and so per device half of it on two."""
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH // 2 // world(), **SAVING}
    run = trainer(folder / f"lora-{world()}", tokens=True, changes=changes, seed=0)
    run.train()
    return run.private


def plan(**changes):
    sampling = dpscale.Poisson(size=SIZE, batch=BATCH)
    settings = {"scaling": dpscale.Clip(C=0.5), "sampling": sampling, "steps": 4, "noise_multiplier": 1.0}
    return dpscale.Plan(**(settings | {"delta": 1e-3} | changes))


def table():
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SIZE, 4, generator=g), torch.randint(0, 3, (SIZE,), generator=g))


def mlp(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def accelerated(order, precision="no", after=None):
    """A run in Accelerate's loop; ``after(accelerator, private)`` comes after each step."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = mlp()
    if order == "prepare first":
        model, optimizer = accelerator.prepare(model, optimizer)
        private = dpscale.privatize(model, optimizer, plan(), seed=0)
    elif order == "privatize first":
        private = dpscale.privatize(model, optimizer, plan(), seed=0)
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, private = prepare(accelerator, model, optimizer, plan(), seed=0)
    for batch in private.batches(table()):
        private.backward(losses(model, batch.to(accelerator.device)))
        accelerator.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(accelerator, private)
    return private


def accelerated_and_killed(folder):
    """Saved after two steps, lost after three."""

    def save_or_end(accelerator, private):
        if private.steps_taken == 2:
            accelerator.save_state(str(folder / "state"))
        if private.steps_taken == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    accelerated("both at once", after=save_or_end)


def both_orders(folder):
    first = accelerated("privatize first")
    second = accelerated("prepare first")
    assert torch.equal(vector(first.model), vector(second.model))
    return second


def train(folder, name):
    private = globals()[name](Path(folder))
    came = {"weights": vector(private.model), "epsilon": private.epsilon(1e-3), "steps": private.steps_taken}
    torch.save(came, Path(folder) / f"{name}-{world()}-{os.environ.get('RANK', '0')}.pt")
