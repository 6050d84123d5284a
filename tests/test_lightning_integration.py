"""`PrivateCallback`: what `Trainer.fit` does with it, beside the plain loop, killed, and on two ranks."""

import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import dpscale
from dpscale.integrations.lightning_parts import _warn_once

from .helpers import SIZE, data, loss_fn, mlp, private, vector
from .lightning_runs import (
    BUDGETS,
    LOADER,
    RANKED,
    Manual,
    ModelCheckpoint,
    Module,
    PrivateCallback,
    fit,
    pl,
    plan,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # in Lightning
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


def plain_loop(**changes):
    """The same as a loop of one's own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    run = private(model, optimizer=optimizer, steps=10, **changes)
    for batch in run.batches(data()):
        run.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return vector(model)


@pytest.mark.parametrize("kind", [Module, Manual])
def test_a_fit_is_the_plain_loop_at_the_same_seed(kind):
    module, callback, running = fit(kind())
    assert torch.equal(vector(module), plain_loop())
    assert running.global_step == callback.private.steps_taken == 10 and running.current_epoch == 2


def test_empty_draws_are_steps_of_noise():
    sampling = dpscale.Poisson(size=SIZE, batch=1)
    callback = PrivateCallback(plan(steps=10, sampling=sampling), seed=0)
    assert torch.equal(vector(fit(Module(), callback)[0]), plain_loop(sampling=sampling))


def test_a_manual_step_in_micro_batches_counts():
    callback = PrivateCallback(plan(steps=10), seed=0, micro_batch=4)

    class InParts(Manual):
        def training_step(self, batch, batch_idx):
            callback.private.step(batch, loss_fn)

    module, _, running = fit(InParts(), callback)
    torch.testing.assert_close(vector(module), plain_loop(), rtol=0, atol=1e-5)
    assert running.global_step == 10


def test_schedulers_validation_and_progress():
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)]

    callback, module = PrivateCallback(epsilon=4, delta=1e-3), Scheduled()
    running = trainer(callback, num_sanity_val_steps=1, max_epochs=3)
    running.fit(module, DataLoader(data(), **LOADER), DataLoader(data(), batch_size=SIZE))
    assert module.validated == 1 + 3
    assert running.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * (1 - 3 / 15))
    assert set(running.callback_metrics) == {"epsilon", "val_loss"}
    assert running.progress_bar_metrics["epsilon"] == pytest.approx(callback.private.epsilon())
    assert 3.9 < callback.private.epsilon() <= 4


@pytest.mark.parametrize(
    ("settings", "steps", "batch"),
    [
        ({"max_epochs": 3}, 15, None),
        ({"max_epochs": -1, "max_steps": 7}, 7, None),
        ({"max_steps": 7}, 6, 25),
        ({"limit_train_batches": 3}, 6, None),
        ({"limit_train_batches": 0.6, "max_epochs": 3}, 9, None),
    ],
)
def test_the_plan_is_that_of_the_trainers_limits(settings, steps, batch, monkeypatch):
    def calibrated(self, epsilon, delta):
        return replace(self, noise_multiplier=epsilon, delta=delta)  # the search for it takes seconds

    monkeypatch.setattr(dpscale.Plan, "calibrate", calibrated)
    _, callback, running = fit(Module(), PrivateCallback(epsilon=4, delta=1e-3, batch=batch), **settings)
    found = callback.private.plan
    assert (running.global_step, found.steps, found.expected_batch) == (steps, steps, batch or 12)
    assert running.estimated_stepping_batches == steps
    assert (found.noise_multiplier, found.delta) == (4, 1e-3)


def test_training_stops_with_the_plan():
    _, callback, running = fit(max_epochs=50)
    assert running.global_step == callback.private.steps_taken == 10 and running.current_epoch == 2


@pytest.mark.parametrize(
    ("micro_batch", "settings"),
    [(5, {}), (None, {"accumulate_grad_batches": 2, "loader": {"batch_size": 6}})],
    ids=["micro", "accumulated"],
)
def test_a_draw_in_micro_batches_is_the_draw(micro_batch, settings):
    """Accumulated batches are parts of one draw: they are released once, with noise once, and count as one step."""
    rows, planned = [], []

    class Counted(Module):
        def on_train_start(self):
            planned.append(self.trainer.estimated_stepping_batches)

        def training_step(self, batch, batch_idx):
            rows.append(len(batch[0]))
            return {"loss": super().training_step(batch, batch_idx)}

    callback = PrivateCallback(epsilon=4, delta=1e-3, seed=0, micro_batch=micro_batch)
    module, _, running = fit(Counted(), callback, **settings)
    plain = fit(Module(), PrivateCallback(epsilon=4, delta=1e-3, seed=0))
    torch.testing.assert_close(vector(module), vector(plain[0]))
    assert running.global_step == callback.private.steps_taken == 10 and planned == [10]
    assert callback.private.plan == plain[1].private.plan and callback.private.epsilon() <= 4
    assert max(rows[10:]) <= (micro_batch or 6)  # a look at the first batch takes more
    assert running.accumulate_grad_batches == settings.get("accumulate_grad_batches", 1)


def test_accumulated_batches_are_looked_at_and_log_nothing(caplog):
    class Coupled(Module):
        def training_step(self, batch, batch_idx):
            losses = super().training_step(batch, batch_idx)
            return losses / losses.detach().sum()

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        fit(Coupled(), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="one per sample"):
        fit(Mean(), accumulate_grad_batches=2)
    _warn_once.cache_clear()
    _, _, running = fit(Logging(), accumulate_grad_batches=2)
    assert "train_loss" not in running.callback_metrics and "it is dropped" in caplog.text


def test_the_sampler_is_replaced_and_that_is_said(caplog):
    seen = []

    class Looking(Module):
        def training_step(self, batch, batch_idx):
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    with caplog.at_level(logging.WARNING, "dpscale"):
        fit(Looking())
    assert "Poisson draws of 12 samples on average, from all 60, take the place of the DataLoader's" in caplog.text
    assert len(set(seen)) > 2


def test_a_data_module_and_its_collation():
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(data(), batch_size=12, collate_fn=self.collated)

        @staticmethod
        def collated(samples):
            x, y = torch.utils.data.default_collate(samples)
            return {"x": x, "y": y}

    class Named(Module):
        def training_step(self, batch, batch_idx):
            assert type(batch) is dict
            return {"loss": loss_fn(self, (batch["x"], batch["y"]))}

    module = Named()
    trainer(PrivateCallback(plan(steps=10), seed=0)).fit(module, datamodule=Data())
    assert torch.equal(vector(module), plain_loop())


def test_the_package_under_its_older_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning as older

    class Older(older.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, batch_idx):
            return loss_fn(self.net, batch)

        configure_optimizers = Module.configure_optimizers
        lr = 0.1

    module = Older()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(PrivateCallback(plan(steps=10), seed=0), package=older).fit(module, DataLoader(data(), **LOADER))
    assert torch.equal(vector(module), plain_loop())


# -- What is logged --------------------------------------------------------------------------------------------------


class Logging(Module):
    def training_step(self, batch, batch_idx):
        losses = super().training_step(batch, batch_idx)
        self.log("train_loss", losses.mean())
        self.log_dict({"more": losses.max()})
        return losses


def test_exact_values_of_a_training_step_are_not_logged(caplog):
    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "dpscale"):
        _, _, running = fit(Logging(), PrivateCallback(plan(steps=10), seed=0))
    assert set(running.callback_metrics) == {"epsilon"}
    assert caplog.text.count("what training_step logs is exact, and no noise hides it: it is dropped") == 1


def test_tensorboard_has_epsilon_beside_the_step(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = pl.loggers.TensorBoardLogger(tmp_path)
    _, callback, _ = fit(Logging(), PrivateCallback(plan(steps=10)), logger=logger, log_every_n_steps=1)
    found = events.EventAccumulator(logger.log_dir).Reload()
    values = [(e.step, e.value) for e in found.Scalars("epsilon")]
    assert [step for step, _ in values] == list(range(10)) and "train_loss" not in found.Tags()["scalars"]
    expected = [callback.private.plan.epsilon(steps=step + 1) for step, _ in values]
    assert [value for _, value in values] == pytest.approx(expected, rel=1e-5)


# -- What is refused -------------------------------------------------------------------------------------------------


class Mean(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).mean()


class ManualMean(Manual):
    def manual_backward(self, loss):
        super().manual_backward(loss.mean())


@pytest.mark.parametrize("kind", [Mean, ManualMean])
def test_a_mean_is_refused(kind):
    with pytest.raises(ValueError, match=r"training_step.*one per sample, shape \(B,\).*shape \(\).*reduction='none'"):
        fit(kind())


def test_a_training_step_that_mixes_samples_is_refused():
    """Before the network, where a look at the network alone would not see it."""

    class Mixing(Module):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return loss_fn(self, (x - x.mean(0), y))

    with pytest.raises(dpscale.UnsupportedModel):
        fit(Mixing())


def test_a_plain_backward_of_ones_own_is_refused():
    class Plain(Manual):
        def training_step(self, batch, batch_idx):
            loss_fn(self, batch).mean().backward()
            self.optimizers().step()

    with pytest.raises(RuntimeError, match="nothing private was computed"):
        fit(Plain())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_clip_val": 1.0}, r"'gradient_clip_val' .* must be None\. Got 1\.0 .*scaling=dpscale\.Clip"),
        ({"max_epochs": -1}, r"'max_epochs' parameter of Trainer must be given"),
    ],
)
def test_settings_that_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        fit(Module(), PrivateCallback(epsilon=4, delta=1e-3), **settings)


def test_loss_scaling_is_refused():
    running = trainer(PrivateCallback(plan(steps=10)))
    running.strategy.precision_plugin.precision = "16-mixed"
    with pytest.raises(ValueError, match=r"'precision' .* without loss scaling. Got '16-mixed' .* 'bf16-mixed'"):
        running.fit(Module(), DataLoader(data(), **LOADER))


def test_accumulation_that_changes_is_refused():
    with pytest.raises(ValueError, match=r"without one that changes accumulate_grad_batches\. Got \['Gradient"):
        fit(None, None, pl.callbacks.GradientAccumulationScheduler({1: 2}))


def test_a_tuner_that_would_train_without_privacy_is_refused():
    module = Module()
    before = vector(module)
    with pytest.raises(RuntimeError, match=r"A tuner .* without privacy\. Nothing was trained.*dpscale\.tune"):
        fit(module, None, pl.callbacks.LearningRateFinder(num_training_steps=3))
    assert torch.equal(vector(module), before)


def test_barebones_trainers_and_numbers_of_numpy():
    callback = PrivateCallback(epsilon=4, delta=1e-3, batch=np.int64(12), seed=0)
    running = pl.Trainer(barebones=True, max_epochs=2, accelerator="cpu", callbacks=[callback])
    running.fit(module := Module(), DataLoader(data(), **LOADER))
    assert torch.equal(vector(module), vector(fit(Module(), PrivateCallback(epsilon=4, delta=1e-3, seed=0))[0]))


@pytest.mark.parametrize("given", [{}, {"epsilon": 3}, {"plan": plan(), "epsilon": 3, "delta": 1e-3}])
def test_a_plan_or_a_budget_must_be_given(given):
    with pytest.raises(ValueError, match="'plan' parameter of PrivateCallback must be given, or epsilon and delta"):
        PrivateCallback(**given)


def test_a_loader_that_leaves_samples_out_is_refused():
    sampler = torch.utils.data.SubsetRandomSampler(range(20))
    with pytest.raises(ValueError, match="over all 60 samples"):
        fit(loader={"batch_size": 12, "sampler": sampler})
    with pytest.raises(ValueError, match=r"of 60 samples, as planned. Got 20"):
        trainer(PrivateCallback(plan(steps=10))).fit(Module(), DataLoader(Subset(data(), range(20)), batch_size=4))


def test_two_optimizers_are_refused():
    class Two(Manual):
        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.net[0], self.net[2])]

    with pytest.raises(ValueError, match=r"configure_optimizers.* for one optimizer. Got '2 of them'"):
        fit(Two())


def test_a_second_fit_with_one_callback_is_refused():
    module, callback, _ = fit()
    with pytest.raises(RuntimeError, match="has trained already"):
        fit(module, callback)


def test_the_module_is_left_as_it_was():
    module, _, _ = fit()
    broken = Mean()
    with pytest.raises(ValueError, match="one per sample"):
        fit(broken)
    for each in (module, broken):
        assert {"training_step", "backward", "log"}.isdisjoint(vars(each))
        assert isinstance(each.trainer, pl.Trainer)


# -- Checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints after each step of a run."""
    folder = tmp_path_factory.mktemp("saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(Module(), None, ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    return folder


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_resumed_fit_pays_for_all_and_draws_afresh(saved, step):
    path = saved / f"step={step}.ckpt"
    ends = []
    for _ in range(2):
        module, callback, running = fit(ckpt_path=path)
        assert running.global_step == callback.private.steps_taken == 10 and running.current_epoch == 2
        assert callback.private.epsilon() == pytest.approx(callback.private.plan.epsilon())
        assert "Resumed: once, with fresh randomness" in callback.private.statement()
        ends.append(vector(module))
    assert not torch.equal(*ends) and not torch.equal(ends[0], plain_loop())


def test_a_finished_fit_that_is_resumed_knows_what_it_cost(saved):
    _, callback, running = fit(ckpt_path=saved / "step=10.ckpt")
    assert running.global_step == callback.private.steps_taken == 10
    assert callback.private.epsilon() == callback.private.plan.epsilon()


def test_a_checkpoint_holds_the_run_and_can_be_loaded_without_pickle(saved):
    found = torch.load(saved / "step=3.ckpt", weights_only=True)
    state = found["callbacks"]["PrivateCallback"]["private"]
    assert state["steps_taken"] == 3 and dpscale.Plan.from_dict(state["plan"]) == plan(steps=10)


def test_another_plan_is_refused(saved):
    with pytest.raises(ValueError, match="its plan is another: steps"):
        fit(Module(), PrivateCallback(plan(steps=20)), ckpt_path=saved / "step=3.ckpt", max_epochs=4)


def test_a_checkpoint_of_plain_training_is_refused(tmp_path):
    class PlainTraining(Module):
        def training_step(self, batch, batch_idx):
            return loss_fn(self, batch).mean()

    running = trainer(ModelCheckpoint(dirpath=tmp_path, filename="plain"))
    running.fit(PlainTraining(), DataLoader(data(), **LOADER))
    with pytest.raises(RuntimeError, match="holds no private run"):
        fit(ckpt_path=tmp_path / "plain.ckpt", max_epochs=4)


# -- Processes -------------------------------------------------------------------------------------------------------


def test_a_killed_fit_goes_on_and_the_ledger_has_every_step(tmp_path, nursery):
    assert nursery.run("tests.lightning_runs:killed", str(tmp_path))[0] == -9
    last = max(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert last.stem == "step=7"
    ledger = dpscale.Ledger(tmp_path / "ledger")
    callback = PrivateCallback(plan(steps=10), ledger=ledger, run="run")
    _, _, running = fit(Module(), callback, ckpt_path=tmp_path / "step=5.ckpt")
    spent = ledger.spent().epsilon
    assert 8 <= callback.private.steps_taken < 10 and running.global_step == callback.private.steps_taken
    assert spent == pytest.approx(callback.private.epsilon()) == pytest.approx(callback.private.plan.epsilon(steps=10))


def test_two_ranks_are_one_process(tmp_path, nursery):
    nursery.ranks(2, "tests.lightning_runs:ranks", str(tmp_path))
    for name, (kind, _, _) in RANKED.items():
        module, callback, running = fit(kind(), PrivateCallback(**BUDGETS[name], seed=0))
        (first, *rest), (second, *more) = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2))
        assert torch.equal(first, second)
        torch.testing.assert_close(first, vector(module), rtol=0, atol=1e-5)
        assert rest == more == [callback.private.epsilon(), running.global_step, 12]
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["callbacks"]["PrivateCallback"]["private"]
        assert state["steps_taken"] == 10
