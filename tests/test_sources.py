"""What people hand over as data: arrays, frames and Hugging Face datasets work; what cannot gets one clear line."""

import logging

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, Subset, SubsetRandomSampler

import dpscale

from .helpers import SIZE, data, loss_fn, mlp, private

datasets = pytest.importorskip("datasets")
pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
BUDGET = {"epsilon": 3, "delta": 1e-3, "epochs": 1, "batch": 12}
X, Y = (t.numpy() for t in data().tensors)


def made(source, model=None, **options):
    model = model or mlp()
    return dpscale.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), source, seed=0, **BUDGET | options)


def frame(**more):
    return pandas.DataFrame({**{f"x{k}": X[:, k].astype(float) for k in range(4)}, "y": Y, **more})


def hugging_face(**more):
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist(), **more})


SOURCES = {
    "tuple": lambda: ((X.astype(np.float64), Y.astype(np.int32)), {}),
    "list": lambda: ([X, Y], {}),
    "tensors": lambda: ((torch.from_numpy(X), torch.from_numpy(Y)), {}),
    "mixed": lambda: ((X, torch.from_numpy(Y)), {}),
    "frame": lambda: (frame(), {"target": "y"}),
    "hugging-face": lambda: (hugging_face(), {}),
    "hugging-face, numpy": lambda: (hugging_face().with_format("numpy"), {}),
    "frame and series": lambda: ((frame()[["x0", "x1", "x2", "x3"]], frame()["y"]), {}),
    "samples": lambda: ([(x, int(y)) for x, y in zip(torch.from_numpy(X), Y, strict=True)], {}),
    "loader": lambda: (DataLoader(hugging_face().with_format("torch"), batch_size=4), {}),
}


def rows(batch):
    return (batch["x"], batch["y"]) if isinstance(batch.data, dict) else tuple(batch)


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_data_make_the_same_run(name):
    source, options = SOURCES[name]()
    plain, run = made(data()), made(source, **options)
    for one, other in zip(plain.batches(), run.batches(), strict=True):
        x, y = rows(other)
        assert x.dtype == torch.float32 and y.dtype == torch.int64 and x.shape[1:] == (4,)
        torch.testing.assert_close((x, y), tuple(one), rtol=1e-6, atol=1e-6)
        run.step(other, lambda model, batch: loss_fn(model, rows_of_data(batch)))
        plain.step(one, loss_fn)
    assert run.plan == plain.plan and run.steps_taken == 5


def rows_of_data(batch):
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch


def test_inputs_alone_and_bytes_stay_what_they_are():
    run = made((np.arange(SIZE * 4, dtype=np.uint8).reshape(SIZE, 4),))
    (x,) = next(run.batches())
    assert x.dtype == torch.uint8
    (x,) = next(made(X).batches())
    assert x.shape[1:] == (4,)


def test_arrays_that_must_not_be_written_are_copied():
    fixed = X.copy()
    fixed.flags.writeable = False
    assert next(made((fixed, Y)).batches())[0].shape[1:] == (4,)


WITH_PEOPLE = {
    "frame": lambda: frame(who=np.arange(SIZE) // 3),
    "hugging-face": lambda: hugging_face(who=[str(i // 3) for i in range(SIZE)]),
}


@pytest.mark.parametrize("source", WITH_PEOPLE.values(), ids=WITH_PEOPLE)
def test_people_from_a_column(source):
    target = {"target": "y"} if isinstance(source(), pandas.DataFrame) else {}
    people = dpscale.by_user(source(), "who", records=2, **target)
    run = made(people, batch=6)
    assert run.plan.sampling.size == SIZE // 3 == len(people)
    for batch in run.batches():
        assert "who" not in batch.data and rows(batch)[0].shape[1:] == (4,)
        run.step(batch, lambda model, batch: loss_fn(model, rows_of_data(batch)))
    with pytest.raises(ValueError, match=r"'users' parameter of by_user must be one of the columns \['x.*Got 'whose'"):
        dpscale.by_user(source(), "whose", records=2, **target)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


@pytest.mark.parametrize(
    "source, options, message",
    [
        (lambda: Stream(), {}, "a dataset with a length and samples by index. Got 'Stream'.*load them into a list"),
        (lambda: [X, Y[1:]], {}, r"arrays of the same length, a row for each sample. Got 'lengths \[60, 59\]'"),
        (lambda: (X.astype(object), Y), {}, "of numbers. Got 'object values'.*Turn categories into numbers"),
        (lambda: frame(), {}, r"'target' parameter of make_private must be the column.*None.*columns are \['x0'"),
        (lambda: frame(), {"target": "z"}, "must be the column of the frame that is to be learned. Got 'z'"),
        (lambda: frame(city=["a"] * SIZE), {"target": "y"}, "of numbers. Got .* values in the column 'city'"),
        (lambda: frame()[["y"]], {"target": "y"}, "a frame with columns beside the target"),
        (lambda: (X, Y), {"target": "y"}, "'target' parameter of make_private must be left out unless"),
        (lambda: datasets.DatasetDict(train=hugging_face()), {}, r"one split of a dataset. Got .*splits \['train'\]"),
        (lambda: hugging_face().to_iterable_dataset(), {}, "Got 'IterableDataset'"),
        (lambda: (X.tolist(), Y.tolist()), {}, "of arrays, or samples.*Got 'tuple of list, list'.*numpy.asarray"),
        (lambda: [X.tolist(), Y], {"batch": "auto"}, "Got 'list of list, ndarray'"),
        (lambda: (csr_matrix(X), Y), {}, "Got 'tuple of csr_matrix, ndarray'.*toarray"),
        (lambda: frame().set_axis([*"aabc", "y"], axis=1), {"target": "y"}, r"names of their own. Got \"\['a'\] more"),
        (lambda: frame(gap=[None] + [1.0] * (SIZE - 1)), {"target": "gap"}, "without missing values. Got .1 in 'gap'"),
        (lambda: pyarrow.table({"x": X[:, 0], "y": Y}), {"target": "y"}, "frame in memory. Got 'Table'.*to_pandas"),
        (lambda: (row for row in data()), {}, "Got 'generator' instead"),
        (lambda: type(data()), {}, "Got 'type' instead"),
        (lambda: "data.csv", {"batch": 2}, "must be a dataset.*Got 'str'"),
        (lambda: {"x": X, "y": Y}, {}, "must be a dataset.*Got 'dict'"),
    ],
)  # fmt: skip
def test_what_cannot_be_data_gets_one_line(source, options, message):
    with pytest.raises(ValueError, match=message) as error:
        made(source(), **options)
    assert "\n" not in str(error.value)


def test_a_target_of_truth_values_is_learned():
    run = made(frame().assign(y=Y % 2 == 1), target="y")
    for batch in run.batches():
        assert batch[1].dtype == torch.int64
        run.step(batch, loss_fn)
    assert run.steps_taken == run.steps


def test_missing_values_of_a_frame_are_said(caplog):
    gaps = frame()
    gaps.loc[3, "x1"] = np.nan
    run = made(gaps, target="y")
    assert "values are missing in the columns ['x1']" in caplog.text and "by a constant" in caplog.text
    for batch in run.batches():
        run.step(batch, loss_fn)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


@pytest.mark.parametrize(
    "twice",
    [
        lambda: Subset(data(), [*range(SIZE - 1), 3]),
        lambda: Subset(Subset(data(), range(SIZE)), [*range(SIZE - 1), 3]),
        lambda: (lambda rows: ConcatDataset([Subset(rows, range(31)), Subset(rows, range(30, SIZE - 1))]))(data()),
    ],
    ids=["subset", "nested", "joined"],
)
def test_a_sample_that_is_there_twice_is_refused(twice):
    """It would add twice the bound."""
    with pytest.raises(ValueError, match=r"each sample once\. Got '1 samples again'.*by_user\(dataset, users"):
        made(twice())
    rows = data()
    apart = ConcatDataset([Subset(rows, range(30)), Subset(rows, range(30, SIZE))])
    assert len(made(apart).batches()) == len(made(ConcatDataset([data(), data()]), batch=24).batches()) == 5


class Buckets:
    """Batches that code of one's own has chosen: of the first so many samples."""

    def __init__(self, many):
        self.batches = [[*range(k, k + 10)] for k in range(0, many, 10)]

    def __iter__(self):
        return iter(self.batches)


class CountedBuckets(Buckets):
    def __len__(self):
        return len(self.batches)


def batches_of(many):
    return BatchSampler(SubsetRandomSampler(range(many)), 5, False), CountedBuckets(many).batches, CountedBuckets(many)


@pytest.mark.parametrize("sampler", batches_of(30), ids=["torch", "list", "own"])
def test_a_loader_whose_batches_leave_samples_out_is_refused(sampler):
    with pytest.raises(ValueError, match=r"over all 60 samples of its dataset\. Got 'one whose sampler has 30'"):
        made(DataLoader(data(), batch_sampler=sampler))


@pytest.mark.parametrize("sampler", batches_of(SIZE), ids=["torch", "list", "own"])
def test_a_loader_with_batches_of_all_samples_is_taken(sampler):
    assert len(made(DataLoader(data(), batch_sampler=sampler)).batches()) == 5


def test_a_loader_whose_batches_have_no_end_is_refused():
    with pytest.raises(ValueError, match=r"Got 'one whose sampler has no length' instead.*or the dataset itself"):
        made(DataLoader(data(), batch_sampler=Buckets(SIZE)))


# -- Data that are given to a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tuple", "list", "tensors", "hugging-face", "frame and series", "samples"])
def test_a_run_draws_from_what_make_private_takes(name):
    source, _ = SOURCES[name]()
    run, plain = private(), private()
    for _ in range(2):  # given again it is the same data
        one, other = next(run.batches(source)), next(plain.batches(data()))
        torch.testing.assert_close(rows(one), tuple(other), rtol=1e-6, atol=1e-6)


def test_arrays_stay_the_same_data_within_a_shuffled_epoch():
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=12), steps=10)
    batches = run.batches((X, Y))
    run.step(next(batches), loss_fn)
    assert len(run.batches((X, Y))) == 9
    with pytest.raises(ValueError, match="the very dataset that this run began with"):
        run.batches((X.copy(), Y))


@pytest.mark.parametrize("kind", [tuple, list])
def test_as_many_arrays_as_samples_are_columns_as_for_make_private(kind):
    run = private(sampling=dpscale.FullBatch(size=2), steps=1)
    x, y = next(run.batches(kind((X[:2], Y[:2]))))
    torch.testing.assert_close((x, y), (torch.tensor(X[:2]), torch.tensor(Y[:2])))


def test_samples_as_a_function_of_ones_own_collates_them_are_left_alone():
    seen = []

    def collated(samples):
        seen.append(type(samples[0]["x"]))
        return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])

    next(private().batches(hugging_face(), collate_fn=collated))
    assert set(seen) == {list}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: Stream(), "a dataset with a length and samples by index. Got 'Stream'"),
        (lambda: (row for row in data()), "Got 'generator'"),
        (lambda: frame(), r"a dataset, or arrays. Got 'DataFrame'.*make_private\(..., target=...\)"),
        (lambda: (X[1:], Y[1:]), "of 60 samples, as planned. Got 59"),
        (lambda: "data.csv", "Got 'str'"),
    ],
    ids=["stream", "generator", "frame", "fewer", "text"],
)
def test_what_cannot_be_drawn_from_gets_one_line(source, message):
    with pytest.raises(ValueError, match=message) as error:
        private().batches(source())
    assert str(error.value).startswith("The 'dataset' parameter of batches must be ") and "\n" not in str(error.value)


@pytest.mark.parametrize("people", [False, True])
@pytest.mark.parametrize("loop", ["batches", "epochs"])
def test_a_dataset_whose_length_changes_is_refused(people, loop):
    """In the midst of a loop, or between two epochs of it."""
    rows = [*data()]
    given = dpscale.by_user(rows, range(SIZE), records=2) if people else rows
    run = made(given, epochs=2)
    with pytest.raises(ValueError, match="The dataset had 60 samples when the run was planned, and has 59 now"):
        for epoch in run.epochs() if loop == "epochs" else [run.batches()]:
            for batch in epoch:
                run.step(batch, loss_fn)
                if loop == "batches" and len(rows) == SIZE:
                    rows.pop()
            if len(rows) == SIZE:
                rows.pop()
    assert 1 <= run.steps_taken <= 5


# -- Other wrong objects ---------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_numbers():
    sampling = dpscale.Poisson(size=np.int64(SIZE), batch=np.int32(12))
    plan = dpscale.Plan(scaling=dpscale.Clip(C=np.float32(0.5)), sampling=sampling, steps=np.int64(5),
                        noise_multiplier=np.float32(1.0), delta=np.float64(1e-3))  # fmt: skip
    assert plan == private(delta=1e-3).plan and plan.to_dict() == private(delta=1e-3).plan.to_dict()
    assert all(type(v) is int for v in (sampling.size, sampling.batch, plan.steps))
    run = made(data(), batch=np.int64(12), epochs=np.int32(1), micro_batch=np.int64(4))
    assert run.plan == made(data()).plan
    for batch in run.batches():
        run.step(batch, loss_fn)
    assert len(dpscale.by_user(data(), np.arange(SIZE) % 7, records=np.int64(2))) == 7
    short = made(data(), epsilon=np.float32(3), delta=np.float32(1e-3)).plan
    assert short.noise_multiplier == pytest.approx(run.plan.noise_multiplier, rel=1e-3) and type(short.delta) is float
    again = made(data())
    batches = again.batches()
    batch = next(batches)
    assert len([*again.parts(batch, np.int64(5))]) == len([*again.parts(batch, 5)]) == -(-len(batch[0]) // 5)


def test_a_lazy_module_is_told_what_to_do():
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"a lazy one \(\['0.weight'\] has none yet\).*Run a batch of zeros"):
        dpscale.make_private(model, optimizer, data(), **BUDGET)
    model(torch.zeros(2, 4))
    run = dpscale.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), **BUDGET)
    for batch in run.batches():
        run.step(batch, loss_fn)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_runs_sample_by_sample_and_says_so(caplog):
    run, plain = made(data(), torch.jit.script(mlp())), made(data())
    for batch in run.batches():
        run.step(batch, loss_fn)
    for batch in plain.batches():
        plain.step(batch, loss_fn)
    for a, b in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert "runs sample by sample" in caplog.text


def test_rates_are_advised(caplog):
    caplog.set_level(logging.INFO, "dpscale")
    told = {}
    for carried, bound in ((0.0, 1.0), (0.9, 2.0)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=carried)
        dpscale.make_private(model, optimizer, data(), scaling=dpscale.Clip(C=bound), **BUDGET)
        (line,) = [r.args for r in caplog.records if "learning rates to try" in r.msg]
        told[carried] = np.array(line)
        caplog.clear()
    assert told[0.0][:2] * 0.1 / 2 == pytest.approx(told[0.9][:2]) and told[0.0][2] == 0.1
    model = mlp()
    dpscale.make_private(model, torch.optim.Adam(model.parameters()), data(), **BUDGET)
    assert "learning rates to try" not in caplog.text


def test_what_is_decided_and_advised_trains_well():
    """Handwritten digits: 95% at the best rate of those tried; without privacy 97%."""
    x, y = load_digits(return_X_y=True)
    x, chosen = x / 16, np.random.default_rng(0).permutation(len(x))
    train, test = chosen[:1437], chosen[1437:]
    advice = dpscale.advise(size=len(train), epsilon=3, delta=1e-4)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(np.sqrt(np.prod(advice.rates))))
    run = dpscale.make_private(model, optimizer, (x[train], y[train]), epsilon=3, delta=1e-4, seed=0)
    for batch in run.batches():
        run.step(batch, loss_fn)
    right = model(torch.tensor(x[test], dtype=torch.float32)).argmax(1).numpy() == y[test]
    assert run.epsilon() <= 3 and right.mean() > 0.85
