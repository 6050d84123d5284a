"""Private fine-tuning of a language model: LoRA by PEFT, with Hugging Face's Trainer.

    pip install 'dpscale[transformers]'
    python examples/lora.py

Nothing is downloaded: the model is a small GPT-2 without pretraining, and the sentences are made up. With real data,
load a pretrained model in its place: a network that knows nothing has little to gain from its adapters.
"""

import random
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from dpscale.integrations.transformers import PrivateTrainer

WORDS = 64
TRAIN, TEST = 1_000, 200


def sentence(number: int) -> dict[str, torch.Tensor]:
    """Words of which each follows from the one before it, most of the time."""
    chance = random.Random(number)
    ids = [chance.randrange(1, WORDS)]
    for _ in range(chance.randint(5, 15)):
        ids.append((ids[-1] * 5 + 3) % (WORDS - 1) + 1 if chance.random() < 0.9 else chance.randrange(1, WORDS))
    return {"input_ids": torch.tensor(ids)}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded to the longest; padding is masked, and has no label."""
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main() -> None:
    """Train the adapters at ε = 3; all other weights stay as they were."""
    torch.manual_seed(0)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters)
    model.print_trainable_parameters()
    rows = [sentence(number) for number in range(TRAIN + TEST)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=100,
                num_train_epochs=4,
                learning_rate=1e-2,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=rows[:TRAIN],
            eval_dataset=rows[TRAIN:],
            data_collator=collate,
            epsilon=3,
            delta=1e-5,
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        print(f"loss on other sentences: {before:.2f} before, {trainer.evaluate()['eval_loss']:.2f} after")
    print(f"spent ε = {trainer.private.epsilon():.2f} at δ = {trainer.plan.delta:g}")


if __name__ == "__main__":
    main()
