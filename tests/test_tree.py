"""The tree itself: who may import whom, where torch's private names are, and that packages are lists of names."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
COMPAT = "dpscale.engine.compat"


def module_name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def parsed(name):
    return ast.parse(MODULES[name].read_text())


# -- Private names of torch ------------------------------------------------------------------------------------------


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_attributes():
    """Of the objects of torch that are handled everywhere, whatever variable holds them."""
    parameter = nn.Parameter(torch.ones(1))
    objects = [
        parameter, parameter.untyped_storage(), nn.Linear(1, 1), torch.optim.SGD([parameter]), torch.Generator(),
        parameter.exp().grad_fn, torch.fx.Graph(), torch.fx.GraphModule(nn.Module(), torch.fx.Graph()),
        torch.nn.utils, torch.utils, torch.autograd, torch.cuda, torch,
    ]  # fmt: skip
    return {name for each in objects for name in dir(each) if is_private(name)}


PRIVATE = private_attributes()


def private_names(tree):
    """The places where code names something private, or experimental, of torch."""
    bound = {}  # what the code calls a thing of torch -> what torch calls it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.name, a.asname or a.name.split(".")[0], a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(f"{node.module}.{a.name}", a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        for path, local, full in names:
            if path.split(".")[0] == "torch":
                bound[local] = full
                if any(map(is_private, path.split("."))) or path.startswith("torch.fx.experimental"):
                    yield node.lineno, path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = root_of(node)
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            saved = node.attr.startswith(("_saved_", "_foreach_"))
            if not own and (root in bound or node.attr in PRIVATE or saved):
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            if node.value in PRIVATE or any(has(full, node.value) for full in bound.values()):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Call) and root_of(node) in bound:
            yield from ((node.lineno, f"{k.arg}=") for k in node.keywords if k.arg and is_private(k.arg))


def root_of(node):
    """The variable that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", None)


def has(path, attribute):
    """Whether a thing of torch, by its full name, has an attribute."""
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(path), attribute)
    except ImportError:
        return hasattr(getattr(importlib.import_module(module), name), attribute)


@pytest.mark.parametrize("name", [n for n in MODULES if n != COMPAT and not n.startswith("dpscale.lab")])
def test_only_compat_names_private_names_of_torch(name):
    assert list(private_names(parsed(name))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._inductor.config",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm as Norm",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "def f():\n    from torch.utils import _pytree",
        "import torch\ntorch._foreach_add_([], 1)",
        "import torch as t\nt._C._functorch.is_functorch_wrapped_tensor",
        "import torch.nn.functional as F\nF._canonical_mask",
        "x._version",
        "x.untyped_storage()._cdata",
        "node._saved_self",
        "node._input_metadata",
        "self.optimizer._optimizer_step_pre_hooks",
        "self.model.get_submodule(n)._parameters[k] = p",
        "for name, m in child._modules.items(): pass",
        "getattr(x, '_version')",
        "import torch.utils.checkpoint as c\nsetattr(c, '_checkpoint_without_reentrant_generator', f)",
        "from torch.func import vmap\nvmap(f, _private=True)",
    ],
)
def test_a_private_name_is_noticed(code):
    assert list(private_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.utils.checkpoint.checkpoint(f)",
        "from torch import nn\nnn.Module.__init__",
        "self._version, self._parameters, cls._modules",
        "from dpscale.engine.compat import version\nversion(x)",
        "other._of_our_own",
        "'_a_word_of_our_own'",
        "for _ in x: pass",
    ],
)
def test_what_is_not_torchs_or_not_private_is_left_alone(code):
    assert not list(private_names(ast.parse(code)))


# -- Imports ---------------------------------------------------------------------------------------------------------


def order():
    """The units of the tree in CONTRIBUTING.md, from top to bottom: modules, and packages that it does not open.

    The names of an opened package itself are where the tree has its ``__init__.py``, or at its end.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = text[text.index("    src/dpscale/\n") :].split("\n\n")[0].splitlines()[1:]
    units, opened = [], [(0, "dpscale")]  # the packages around a line, with their indentation
    for line in [*block, ""]:
        indentation = len(line) - len(line.lstrip())
        while len(opened) > 1 and opened[-1][0] >= indentation:
            closed = opened.pop()[1]
            units += [closed] if closed not in units else []
        package = opened[-1][1]
        for name, kind in re.findall(r"(\w+)(\.py|/)(?!\w)", line):
            full = package if name == "__init__" else f"{package}.{name}"
            if full not in MODULES:  # a word of the description
                continue
            if kind == "/" and full != "dpscale.lab":  # one unit: its modules are not in an order yet
                opened.append((indentation, full))
            elif full not in units:
                units.append(full)
    return units


ORDER = order()


def unit_of(name):
    """The unit that a module belongs to: itself, or the package in which the tree does not tell modules apart."""
    while name not in ORDER:
        assert name, "no unit of the tree in CONTRIBUTING.md has this module"
        name = name.rpartition(".")[0]
    return name


def imported(name):
    """The modules of ours that a module imports, wherever in it; what it names in annotations alone is not imported."""
    tree = parsed(name)
    types = {each for node in ast.walk(tree) if is_for_types(node) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if node in types:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dpscale":
            for a in node.names:
                full = f"{node.module}.{a.name}"
                yield full if full in MODULES else node.module


def is_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_the_tree_names_every_module():
    opened = {unit.rpartition(".")[0] for unit in ORDER}
    assert [n for n in MODULES if n != "dpscale" and n not in ORDER and n.rpartition(".")[0] in opened] == []


@pytest.mark.parametrize("name", [n for n in MODULES if n != "dpscale"])
def test_a_module_imports_only_modules_above_it(name):
    place = ORDER.index(unit_of(name))
    assert [m for m in imported(name) if m != COMPAT and ORDER.index(unit_of(m)) > place] == []


def test_compat_imports_nothing_of_ours():
    """So that all may import it."""
    assert not list(imported(COMPAT))


def test_the_order_is_read_from_the_tree():
    at = ORDER.index
    assert at("dpscale.checks") < at("dpscale.engine.compat") < at("dpscale.engine.rules") < at("dpscale.training")
    assert at("dpscale.engine.layout") < at("dpscale.engine.combine") < at("dpscale.engine") < at("dpscale.noise")
    assert at("dpscale.training") < at("dpscale.lab") < at("dpscale.cli")


# -- Packages --------------------------------------------------------------------------------------------------------


LAZY = ["dpscale"]


@pytest.mark.parametrize(
    "name", ["dpscale", *(f"dpscale.{name}" for name in ("lab", "engine", "noise", "card", "audit"))]
)
def test_a_package_is_a_list_of_names(name):
    docstring, *body = parsed(name).body
    assert isinstance(docstring, ast.Expr)
    for node in body:
        named = isinstance(node, ast.Assign) and [t.id for t in node.targets] in (["__version__"], ["__all__"])
        listed = is_for_types(node) and all(isinstance(each, ast.ImportFrom) for each in node.body)
        assert named or listed or isinstance(node, (ast.Import, ast.ImportFrom)), ast.unparse(node)[:80]


@pytest.mark.parametrize("name", LAZY)
def test_names_that_are_imported_when_used_are_those_that_types_are_checked_with(name):
    (block,) = filter(is_for_types, parsed(name).body)
    package = importlib.import_module(name)
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(typed) == package.__all__ and typed.keys() <= set(dir(package))
    for each, module in typed.items():
        assert getattr(package, each) is getattr(importlib.import_module(module), each)


@pytest.mark.parametrize("name", LAZY)
def test_no_name_of_a_package_is_that_of_its_module(name):
    """Whoever imported the module would find it in the name's place."""
    assert [n for n in importlib.import_module(name).__all__ if f"{name}.{n}" in MODULES] == []


@pytest.mark.parametrize("name", LAZY)
def test_a_package_refuses_names_that_it_does_not_have(name):
    with pytest.raises(AttributeError, match=f"^module '{name}' has no attribute 'nothing'$"):
        importlib.import_module(name).nothing  # noqa: B018


def test_every_breakage_fits_the_code():
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "breakages.py", "--list"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
