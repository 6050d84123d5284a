"""A text classifier trained privately with Hugging Face's Trainer.

    pip install 'dpscale[transformers]'
    python examples/text_trainer.py

Nothing is downloaded: the texts are made up, and the model is a small BERT without pretraining, which learns little
from 2,000 texts at ε = 3: the script shows how it is done. With real data, load a pretrained model and its tokenizer.
"""

import random
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from dpscale.integrations.transformers import PrivateTrainer

GOOD = ["good", "great", "fine", "lovely", "superb", "warm", "bright"]
BAD = ["bad", "poor", "dull", "dreadful", "broken", "cold", "grey"]
OTHER = ["the", "a", "film", "book", "meal", "was", "is", "it", "and", "very", "so", "we", "they", "saw", "had"]
TRAIN, TEST = 2_000, 500


def review(number: int) -> tuple[str, int]:
    """A made-up review, and whether it is a good one."""
    chance = random.Random(number)
    label = chance.randrange(2)
    words = chance.choices(OTHER, k=chance.randint(4, 14)) + chance.choices(GOOD if label else BAD, k=2)
    chance.shuffle(words)
    return " ".join(words), label


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def main() -> None:
    """Train at ε = 3, and say what was spent and what was learnt."""
    tokenizer = word_tokenizer()
    rows = [{**tokenizer(text), "labels": label} for text, label in map(review, range(TRAIN + TEST))]
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PrivateTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=100,
                gradient_accumulation_steps=2,
                num_train_epochs=5,
                learning_rate=1e-2,
                logging_steps=10,
                eval_strategy="epoch",
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=rows[:TRAIN],
            eval_dataset=rows[TRAIN:],
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
            epsilon=3,
            delta=1e-5,
        )
        trainer.train()
        print(f"accuracy on other reviews: {trainer.evaluate()['eval_accuracy']:.3f}")
    print(f"spent ε = {trainer.private.epsilon():.2f} at δ = {trainer.plan.delta:g}")


if __name__ == "__main__":
    main()
