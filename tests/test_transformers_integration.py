"""PrivateTrainer on tiny models: against the plain loop, the plain Trainer, and itself in other processes."""

import json
import logging
import math
import signal

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

import dpscale
from dpscale.integrations.model_losses import PerSampleLoss
from dpscale.integrations.transformers import PrivateTrainer

from . import trainers
from .trainers import BATCH, NO_DROPOUT, SAVING, SIZE, TINY_BERT, Texts, arguments, bert, collate, lora, trainer, vector


def records(folder):
    """All that a run has written in JSON."""
    return [json.loads(path.read_text()) for path in folder.rglob("trainer_state.json")]


# -- What is logged ----------------------------------------------------------------------------------------------------


def test_epsilon_is_logged_beside_the_step_and_no_exact_number_is(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 5}
    run = trainer(tmp_path, changes=changes, eval_dataset=Texts())
    done = run.train()
    history = run.state.log_history
    assert [record["step"] for record in history] == [2, 4, 5]
    for record in history:
        assert record["epsilon"] == run.plan.epsilon(steps=record["step"])
    assert run.private.steps_taken == 5 and 2.9 < run.private.epsilon() <= 3
    assert math.isnan(done.training_loss) and "train_loss" not in done.metrics
    (saved,) = records(tmp_path)
    for record in (*history, done.metrics, *saved["log_history"], saved):
        assert not {"loss", "train_loss", "num_input_tokens_seen"} & {n for n, v in record.items() if v}
        assert not record.get("total_flos")


def test_exact_losses_are_logged_if_asked_for(tmp_path):
    run = trainer(tmp_path, log_exact_loss=True)
    done = run.train()
    assert 0.1 < run.state.log_history[0]["loss"] < 3 and 0.1 < done.training_loss < 3


# -- The same as without it --------------------------------------------------------------------------------------------


def steered(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def class_losses(model, batch):
    inputs = dict(batch)
    labels = inputs.pop("labels")
    return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, reduction="none")


SPLIT = {"per_device_train_batch_size": BATCH // 3, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("changes", [{"num_train_epochs": 2}, {"max_steps": 7, **SPLIT}], ids=["epochs", "accumulated"])
def test_it_is_the_plain_loop(tmp_path, changes):
    model = bert(**NO_DROPOUT)
    run = trainer(tmp_path, model, changes=changes, optimizers=steered(model), seed=0)
    run.train()
    plain = bert(**NO_DROPOUT)
    optimizer, scheduler = steered(plain)
    private = dpscale.privatize(plain, optimizer, run.plan, seed=0)
    for batch in private.batches(Texts(), collate_fn=collate):
        private.step(batch, class_losses)
        scheduler.step()
    assert private.steps_taken == run.private.steps_taken == run.state.global_step == run.plan.steps
    assert (vector(bert(**NO_DROPOUT)) - vector(plain)).abs().max() > 0.01
    torch.testing.assert_close(vector(model), vector(plain), rtol=1e-5, atol=1e-6)


def test_arguments_stay_as_they_were_and_clipping_is_off(tmp_path, caplog):
    weights = []
    for changes in ({}, {"max_grad_norm": 1e-6}):
        model, args = bert(**NO_DROPOUT), arguments(tmp_path, **changes, **SPLIT)
        before = args.to_dict()
        run = PrivateTrainer(
            model=model, args=args, train_dataset=Texts(), data_collator=collate, epsilon=3, delta=1e-3, seed=0,
            optimizers=steered(model),
        )  # fmt: skip
        run.train()
        assert args.to_dict() == before
        assert run.plan.expected_batch == BATCH
        weights.append(vector(model))
    assert torch.equal(*weights)
    (said,) = [record.message for record in caplog.records if "has no effect" in record.message]
    assert said == (
        "dpscale: max_grad_norm=1e-06 has no effect in a PrivateTrainer: samples are bounded one by one, before the "
        "noise; clipping their noisy mean would only lower the learning rate."
    )


def test_evaluation_and_prediction_are_those_of_the_plain_trainer(tmp_path):
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {"share": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    changes = {"eval_strategy": "epoch"}
    run = trainer(tmp_path, changes=changes, eval_dataset=Texts(), compute_metrics=metrics)
    run.train()
    plain = Trainer(run.model, arguments(tmp_path), collate, eval_dataset=Texts(), compute_metrics=metrics)
    ours, theirs = run.evaluate(), plain.evaluate()
    assert len(seen) == 3 and ours["eval_loss"] == theirs["eval_loss"] and ours["eval_share"] == theirs["eval_share"]
    assert next(r["eval_loss"] for r in run.state.log_history if "eval_loss" in r) == theirs["eval_loss"]
    ours, theirs = run.predict(Texts()), plain.predict(Texts())
    assert (ours.predictions == theirs.predictions).all()


def test_adapters_alone_are_trained_in_bfloat16(tmp_path):
    model = lora()
    before = {n: p.clone() for n, p in model.named_parameters()}
    seen = []
    model.base_model.model.transformer.h[0].attn.c_attn.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    run = trainer(tmp_path, model, tokens=True, changes={"bf16": True, "label_smoothing_factor": 0.1})
    run.train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n} and run.private.steps_taken == 5
    assert torch.bfloat16 in seen and all(p.dtype == torch.float32 for p in model.parameters())


# -- The loss of a sample ----------------------------------------------------------------------------------------------


def ids(*shape, least=3):
    return torch.randint(least, 50, shape, generator=torch.Generator().manual_seed(len(shape)))


def cut(labels):
    """Without the last labels of each row, of one more in every next one."""
    return torch.where(
        torch.arange(labels.shape[1]) < labels.shape[1] - torch.arange(len(labels))[:, None], labels, -100
    )


def config(**changes):
    return BertConfig(**TINY_BERT, **NO_DROPOUT, **changes)


T5 = T5Config(
    vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, decoder_start_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = {
    "classes": lambda: (BertForSequenceClassification(config(num_labels=4)), {"labels": torch.tensor([0, 3, 1])}),
    "regression": lambda: (BertForSequenceClassification(config(num_labels=1)), {"labels": torch.randn(3)}),
    "several classes": lambda: (
        BertForSequenceClassification(config(num_labels=2, problem_type="multi_label_classification")),
        {"labels": torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])},
    ),
    "tokens": lambda: (BertForTokenClassification(config(num_labels=3)), {"labels": cut(ids(3, 8) % 3)}),
    "answers": lambda: (
        BertForQuestionAnswering(config()),
        {"start_positions": torch.tensor([0, 2, 5]), "end_positions": torch.tensor([1, 7, 6])},
    ),
    "causal": lambda: (lora(), {"labels": cut(ids(3, 8))}),
    "decoder": lambda: (T5ForConditionalGeneration(T5), {"labels": cut(ids(3, 6))}),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_sample_is_what_the_model_has_for_it_alone(tmp_path, family, smoothing):
    if smoothing and family in ("several classes", "answers", "regression", "decoder"):
        pytest.skip("transformers does not smooth these, or needs another collator")
    torch.manual_seed(0)
    model, labels = FAMILIES[family]()
    model.eval()
    batch = {"input_ids": ids(3, 8), **labels}
    plain = Trainer(model, arguments(tmp_path, label_smoothing_factor=smoothing))
    ours = PerSampleLoss.of(model, smoothing)(model, batch)
    theirs = [plain.compute_loss(model, {n: t[k : k + 1] for n, t in batch.items()}) for k in range(3)]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-5, atol=1e-6)
    assert len(set(ours.tolist())) == 3  # or a wrong order would not be seen


class Doubled(BertForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None):
        output = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        if output.loss is not None:
            output.loss = output.loss * 2
        return output


def test_a_model_with_a_loss_of_its_own_is_refused_before_anything_is_released(tmp_path):
    run = trainer(tmp_path, Doubled(BertConfig(**TINY_BERT)))
    with pytest.raises(
        ValueError, match=r"The loss of a single sample is not known for Doubled: .* Pass compute_loss_func"
    ):
        run.train()
    assert run.private.steps_taken == 0
    given = trainer(tmp_path, Doubled(BertConfig(**TINY_BERT)), compute_loss_func=own_losses, changes={"max_steps": 1})
    given.train()
    assert given.private.steps_taken == 1


def own_losses(outputs, labels, num_items_in_batch=None):
    return 2 * torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")


def test_a_mean_over_the_batch_is_refused(tmp_path):
    run = trainer(tmp_path, compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.mean())
    with pytest.raises(ValueError, match="The losses must be per sample"):
        run.train()
    assert run.private.steps_taken == 0


# -- What is released is charged ---------------------------------------------------------------------------------------


class StoppedAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def test_a_run_that_stops_early_has_spent_what_it_released(tmp_path):
    run = trainer(tmp_path, callbacks=[StoppedAt()])
    run.train()
    assert run.private.steps_taken == 2
    assert run.state.log_history[-1]["epsilon"] == run.plan.epsilon(steps=2) < run.plan.epsilon()
    with pytest.raises(RuntimeError, match="A PrivateTrainer trains once"):
        run.train()


class Plain(PrivateTrainer):
    training_step = Trainer.training_step


def test_a_plain_step_is_refused(tmp_path):
    model = bert()
    before = vector(model)
    run = Plain(model, arguments(tmp_path), collate, Texts(), epsilon=3, delta=1e-3)
    with pytest.raises(RuntimeError, match=r"private\.backward\(losses\)"):
        run.train()
    assert run.private.steps_taken == 0 and torch.equal(vector(model), before)


def test_draws_without_samples_are_steps(tmp_path):
    run = trainer(tmp_path, changes={"per_device_train_batch_size": 1, "max_steps": 6}, seed=0)
    sizes, step = [], run.training_step
    run.training_step = lambda model, batch, *rest: (sizes.append(len(batch.draw.indices)), step(model, batch, *rest))[
        1
    ]
    run.train()
    assert 0 in sizes and len(sizes) == run.private.steps_taken == 6


def test_a_ledger_has_every_step(tmp_path):
    ledger = dpscale.Ledger(tmp_path / "ledger.db", epsilon=4, delta=1e-3)
    run = trainer(tmp_path, ledger=ledger, run="first")
    run.train()
    run.private.close()
    assert 2.9 < ledger.spent().epsilon < 3.1
    with pytest.raises(ValueError, match="The plan of the run 'second' does not fit into the budget"):
        trainer(tmp_path, ledger=ledger, run="second").train()


# -- Resuming, and several ranks ---------------------------------------------------------------------------------------


def test_a_killed_run_is_resumed_with_fresh_noise_and_the_whole_epsilon(tmp_path, nursery):
    code, _, errors = nursery.run("tests.trainers:train", str(tmp_path), "killed")
    assert code == -signal.SIGKILL, errors[-2000:]
    folder = tmp_path / "run"
    assert [path.name for path in folder.iterdir()] == ["checkpoint-2"]
    (folder / "checkpoint-4").mkdir()  # as if it had been killed while it saved
    (folder / "checkpoint-4" / "private.safetensors").touch()
    weights = []
    for _ in range(2):
        run = trainer(folder, seed=0, changes={"save_strategy": "no", "save_steps": 2})
        run.train(resume_from_checkpoint=True)
        assert run.private.steps_taken == run.state.global_step == 5
        assert [record["step"] for record in run.state.log_history] == [2, 4, 5]
        assert run.state.epoch == 1.0 and run.state.log_history[1]["epoch"] == 0.8
        assert run.state.log_history[-1]["epsilon"] == run.plan.epsilon()
        assert "Resumed: once, with fresh randomness." in run.private.statement()
        weights.append(vector(run.model))
    assert not torch.equal(*weights)
    (folder / "checkpoint-2" / "private.safetensors").unlink()
    for asked in (True, str(folder / "checkpoint-2")):
        with pytest.raises(ValueError, match="must be a checkpoint that a PrivateTrainer wrote"):
            trainer(folder).train(resume_from_checkpoint=asked)


def test_another_plan_does_not_resume(tmp_path):
    trainer(tmp_path, changes=SAVING).train()
    run = trainer(tmp_path, changes={"num_train_epochs": 2})
    with pytest.raises(ValueError, match=r"its plan is another: .*Nothing was changed"):
        run.train(resume_from_checkpoint=True)


def test_two_ranks_are_one(tmp_path, nursery):
    nursery.ranks(2, "tests.trainers:train", str(tmp_path), "ranks")
    first, second = (torch.load(tmp_path / f"ranks-2-{rank}.pt") for rank in range(2))
    private = trainers.ranks(tmp_path)
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], vector(private.model), rtol=1e-5, atol=1e-7)
    assert (vector(lora()) - first["weights"]).abs().max() > 0.01
    assert first["epsilon"] == second["epsilon"] == private.epsilon() and first["steps"] == private.steps_taken == 5
    for world in (1, 2):
        names = {path.name for path in (tmp_path / f"lora-{world}" / "checkpoint-5").iterdir()}
        assert {"private.safetensors", "adapter_model.safetensors", "optimizer.pt"} <= names


# -- What is taken, and what is not ------------------------------------------------------------------------------------


def test_options_of_the_loader_are_kept(tmp_path):
    changes = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3, "dataloader_persistent_workers": True}
    loader = trainer(tmp_path, changes=changes).get_train_dataloader()
    kept = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}
    assert kept.items() <= loader.options.items() and len(loader) == SIZE // BATCH
    with pytest.raises(RuntimeError, match="Batches are drawn, and charged, by train"):
        iter(loader)


def test_a_plan_takes_the_place_of_the_budget(tmp_path):
    sampling = dpscale.FixedSize(size=SIZE, batch=10)
    plan = dpscale.Plan(scaling=dpscale.AutoS(C=1.0), sampling=sampling, steps=3, noise_multiplier=1.0)
    run = trainer(tmp_path, plan=plan, delta=1e-3)
    run.train()
    assert run.private.plan is plan and run.private.steps_taken == 3
    assert run.state.log_history[-1]["epsilon"] == plan.epsilon(delta=1e-3)


@pytest.mark.parametrize("planned", [False, True])
def test_people_are_trained_on(tmp_path, planned):
    """The plan of the trainer says so too: what it states is what is protected."""
    people = dpscale.by_user(Texts(), [i // 3 for i in range(SIZE)], records=2)
    sampling = dpscale.Poisson(size=len(people), batch=BATCH)
    given = {"plan": trainers.plan(sampling=sampling, steps=2)} if planned else {}
    run = trainer(tmp_path, train_dataset=people, **given)
    assert "a person with at most 2 records" in run.plan.statement() and run.plan.sampling.size == SIZE // 3
    run.train()
    assert run.private.plan == run.plan and run.private.statement().startswith("Guarantee")
    assert run.state.log_history[-1]["epsilon"] == run.plan.epsilon() == run.private.epsilon()


def test_tensorboard_has_epsilon_beside_the_step(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = trainer(tmp_path, changes={"report_to": ["tensorboard"], "logging_steps": 1})
    run.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    found = events.EventAccumulator(str(folder)).Reload()
    values = [(e.step, e.value) for e in found.Scalars("train/epsilon")]
    assert [step for step, _ in values] == [1, 2, 3, 4, 5, 5]
    assert [value for _, value in values] == pytest.approx([run.plan.epsilon(steps=step) for step, _ in values])
    assert not {tag for tag in found.Tags()["scalars"] if "loss" in tag}


class Stream(IterableDataset):
    def __len__(self):
        return SIZE

    def __iter__(self):
        return map(Texts().__getitem__, range(SIZE))


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *args, **kwargs):
        return torch.zeros(())


PLAN = trainers.plan()
REFUSED = {
    "args.neftune_noise_alpha": ({"changes": {"neftune_noise_alpha": 1.0}}, "must be left out. Got 1.0 instead"),
    "args.max_steps": ({"plan": PLAN, "changes": {"max_steps": 9}}, "must be at most the 4 steps of the plan. Got 9"),
    "train_dataset": (
        {"train_dataset": Stream()},
        "must be a dataset with a length and samples by index. Got 'Stream'",
    ),
    "args.accelerator_config": (
        {"changes": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}},
        "must be without gradient accumulation. Got 4 instead",
    ),
    "epsilon": ({"epsilon": None}, "must be given, and delta, or plan in their place"),
    "plan": ({"plan": PLAN, "epsilon": 3}, "must be given alone. Got 'epsilon or scaling beside it' instead"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_private_is_refused(tmp_path, name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError) as error:
        trainer(tmp_path, **options)
    assert f"The '{name}' parameter of PrivateTrainer {message}" in str(error.value)


@pytest.mark.parametrize("name", ["fp16", "deepspeed", "fsdp"])
def test_ways_of_training_that_are_not_known_are_refused(tmp_path, name):
    args = arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(ValueError, match=rf"The 'args\.{name}' parameter of PrivateTrainer must be left out"):
        PrivateTrainer(bert(), args, collate, Texts(), epsilon=3, delta=1e-3)


def test_a_loss_of_a_subclass_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without compute_loss of its own\. Got 'OwnLoss' instead.*compute_loss_func"):
        OwnLoss(bert(), arguments(tmp_path), collate, Texts(), epsilon=3, delta=1e-3)


def test_what_has_no_effect_is_said(tmp_path, caplog):
    data = Texts()
    changes = {"dataloader_drop_last": True, "auto_find_batch_size": True, "include_num_input_tokens_seen": True}
    with caplog.at_level(logging.WARNING, "dpscale"):
        run = trainer(tmp_path, changes=changes, train_dataset=data, eval_dataset=data)
    said = " ".join(record.message for record in caplog.records)
    for name in changes:
        assert f"dpscale: {name}=" in said
    assert "evaluation on the training data gives exact numbers" in said
    assert not run.args.dataloader_drop_last and not run.args.auto_find_batch_size
