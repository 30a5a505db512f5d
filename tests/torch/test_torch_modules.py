"""What modules of `blockcell.torch` are in PyTorch: compiled, exported, copied, saved, swapped; and what they refuse.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from typing import ClassVar

import numpy as np
import pytest
from fresh import printed
from refusals import refusal
from torch_cases import (
    CHANGES_OF_WEIGHTS,
    MARKS,
    Recorder,
    check_operators,
    check_refused,
    flat_tensors,
    hx_of,
    training_step,
)

from blockcell import _kernels, convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
internals = pytest.importorskip("blockcell.torch.internals")
TorchFunctionMode = pytest.importorskip("torch.overrides").TorchFunctionMode
tree_map_only = pytest.importorskip("torch.utils._pytree").tree_map_only
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
rnn, forward_ad = torch.nn.utils.rnn, torch.autograd.forward_ad

pytestmark = MARKS
KINDS = ["LSTM", "GRU", "RNN"]
CELLS = [f"{kind}Cell" for kind in KINDS]
OPERATORS = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}
OPERATORS |= {f"{kind}Cell": f"{name}_cell" for kind, name in OPERATORS.items()}


def make_module(kind, *sizes, scheme=None, **options):
    """Make a module of a kind, or one that is quantized by a scheme."""
    torch.manual_seed(3)
    module = getattr(nn, kind)(*(sizes or (5, 8)), **options)
    if scheme:
        nn.replace(module.eval(), scheme)
    return module


def random_input(kind, **options):
    """Draw an input of a module, or of a cell."""
    return torch.randn(*([] if kind in CELLS else [4]), 3, 5, **options)


def first_tensor(output):
    """Return y, or h of a cell."""
    return output if isinstance(output, torch.Tensor) else output[0]


def assert_equal(results, expected):
    """Assert that results are equal, or None where None is expected."""
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


WITH_SCHEMES = [(kind, None) for kind in KINDS] + [("LSTM", "int8"), ("GRU", "int8")]


def random_hx(kind, *shape, dtype=torch.float32):
    """Draw an hx."""
    return hx_of(kind, torch.randn(2, *shape, dtype=dtype).unbind())


# ------------------------------------------------------------------------------------------------ compiled and exported
COMPILED = [
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "dtype": torch.float64},
    {"num_layers": 2, "dropout": 0.0, "batch_first": True},
]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("options", COMPILED, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, options, backend, dynamo):
    module = make_module(kind, **options)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for B, T in ((3, 4), (5, 4), (2, 7)):  # sizes become symbols
        x = torch.randn(B, T, 5, dtype=module.weight_ih_l0.dtype, requires_grad=True)
        assert_equal(training_step(module, compiled, x), training_step(module, module, x))
    hx = random_hx(kind, len(module.all_weights), x.shape[not module.batch_first], 8, dtype=x.dtype)
    assert_equal(training_step(module, compiled, x, hx), training_step(module, module, x, hx))
    with torch.no_grad():
        assert_equal(flat_tensors(compiled(x)), flat_tensors(module(x)))


@pytest.mark.parametrize("form", ["sorted", "unsorted"])
@pytest.mark.parametrize("kind, scheme", WITH_SCHEMES)
def test_compiled_with_packed_sequences(kind, scheme, form, dynamo):
    module = make_module(kind, scheme=scheme, num_layers=2, bidirectional=True)
    packed = rnn.pack_padded_sequence(torch.randn(6, 3, 5), [6, 4, 1], enforce_sorted=False)
    if form == "sorted":
        packed = rnn.PackedSequence(packed.data, packed.batch_sizes)
    data = packed.data.requires_grad_(scheme is None)

    def call(data, given):
        return module(rnn.PackedSequence(data, *packed[1:]), given)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    hx = random_hx(kind, 4, 3, 8) if form == "unsorted" else None
    if scheme is None:
        assert_equal(training_step(module, compiled, data, hx), training_step(module, call, data, hx))
    else:
        assert_equal(flat_tensors(compiled(data, hx)), flat_tensors(call(data, hx)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind, scheme", WITH_SCHEMES)
def test_exported(kind, scheme, strict, training, dynamo):
    """A quantized module is for inference; what `training` is for it is whether gradients are enabled."""
    module = make_module(kind, scheme=scheme, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 4, 5)
    sizes = {0: torch.export.Dim("B", min=2), 1: torch.export.Dim("T", min=2)}
    with torch.set_grad_enabled(training):
        program = torch.export.export(module, (x,), dynamic_shapes=(sizes,), strict=strict)
        exported, lowered = program.module(), program.run_decompositions().module()
        for B, T in ((3, 4), (2, 9)):
            x = torch.randn(B, T, 5, requires_grad=training and scheme is None)
            expected = flat_tensors(module(x))
            assert_equal(flat_tensors(exported(x)), expected)
            assert_equal(flat_tensors(lowered(x)), expected)
            if x.requires_grad:
                assert_equal(training_step(exported, exported, x), training_step(module, module, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.usefixtures("new_memory_differs")
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_operators_pass_opcheck(kind):
    recorder, is_cell = Recorder(), kind in CELLS
    for options in ({}, {"bias": False} | ({} if is_cell else {"bidirectional": True})):
        module = make_module(kind, 3, 4, **options)
        x = torch.randn(*([] if is_cell else [5]), 2, 3, requires_grad=True)
        hx = random_hx(kind, *([] if is_cell else [1 + module.bidirectional]), 2, 4)
        with recorder:
            training_step(module, module, x)
            training_step(module, module, x if is_cell else rnn.pack_padded_sequence(x, [5, 3]), hx)
            module(x.detach().transpose(0, 1).contiguous().transpose(0, 1))
            with torch.no_grad():
                module(x, hx)
    check_operators(recorder, module._op._op, OPERATORS[kind], (8, 4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind, scheme", WITH_SCHEMES)
def test_traced(kind, scheme, training):
    module = make_module(kind, scheme=scheme, num_layers=2, bidirectional=True)
    x = torch.randn(4, 3, 5, requires_grad=training and scheme is None)
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        traced = torch.jit.trace(module, (torch.randn(4, 3, 5),))
        assert_equal(flat_tensors(traced(x)), flat_tensors(module(x)))
        if x.requires_grad:
            assert_equal(training_step(traced, traced, x), training_step(module, module, x))


class Traceable(torch.nn.Module):
    """A model that calls its module twice."""

    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = make_module(kind, num_layers=2), torch.nn.Linear(8, 2)

    def forward(self, x, h, c):
        y, last = self.rnn(x, (h, c) if isinstance(self.rnn, nn.LSTM) else h)
        return self.head(torch.relu(y)), self.rnn(x)[0], last


@pytest.mark.parametrize("kind", KINDS)
def test_symbolically_traced(kind):
    model = Traceable(kind)
    traced = torch.fx.symbolic_trace(model)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["rnn", "head", "rnn"]
    inputs = torch.randn(4, 3, 5), *torch.randn(2, 2, 3, 8)
    for found, expected in zip(traced(*inputs), model(*inputs), strict=True):
        assert_equal([*found], [*expected])
    with pytest.raises(TypeError, match=f"blockcell.torch.{kind}: input is of type Proxy"):  # no leaf, but all of it
        torch.fx.symbolic_trace(model.rnn)


class Subclass(torch.Tensor):
    """A tensor whose results are of its class."""


class Wrapper(torch.Tensor):
    """A wrapper of another tensor, which sees operators."""

    seen: ClassVar = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        options = {"dtype": inner.dtype, "strides": inner.stride(), "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        args, kwargs = tree_map_only(cls, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


CLASSES = {"subclass": lambda a: a.as_subclass(Subclass), "wrapper": Wrapper}


@pytest.mark.parametrize("of", ["input", "weight", "hx", "gradient"])
@pytest.mark.parametrize("way", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_classes_derived_from_tensor(kind, way, of):
    """They come out, see the operators, and the numbers are the same."""
    change, kept = CLASSES[way], Subclass if way == "subclass" else Wrapper
    module, x, hx = make_module(kind), torch.randn(4, 3, 5), random_hx(kind, 1, 3, 8)
    given = (x, hx)
    (y, _), weight = module(*given), module.weight_hh_l0
    (expected_grad,) = torch.autograd.grad(y, weight, torch.cos(y.detach()))
    if of == "input":
        given = change(x), hx
    elif of == "hx":
        given = x, ((change(hx[0]), hx[1]) if kind == "LSTM" else change(hx))
    elif of == "weight":
        module.weight_hh_l0 = torch.nn.Parameter(change(weight.detach()))
    Wrapper.seen.clear()
    with torch.no_grad():
        found = module(*given)[0]
    assert isinstance(found, kept) or of == "gradient"
    found = module(*given)[0]
    gradient = torch.cos(y.detach())
    found.backward(change(gradient) if of == "gradient" else gradient)
    grad = module.weight_hh_l0.grad
    if way == "wrapper":
        operators = ("forward", "forward", "backward")[2 * (of == "gradient") :]
        assert [name for name in Wrapper.seen if name.startswith("blockcell.")] == [
            f"blockcell.{OPERATORS[kind]}_{operator}.default" for operator in operators
        ]
        found, grad = (a.inner if isinstance(a, Wrapper) else a for a in (found, grad))
    assert_equal(
        [found.detach().as_subclass(torch.Tensor), grad.as_subclass(torch.Tensor)], [y.detach(), expected_grad]
    )


def test_function_modes_see_operators():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    module, x = make_module("GRU"), torch.randn(4, 3, 5)
    with Mode():
        found = module(x)[0]
    assert "blockcell.gru.default" in seen
    assert_equal([found], [module(x)[0]])


def test_internals_are_there():
    """In the PyTorch that is installed."""
    assert internals.COMPLETE and isinstance(internals.forward_ad._current_level, int)


@pytest.mark.parametrize(
    "kind, scheme, missing",
    [*((*pair, "COMPLETE") for pair in WITH_SCHEMES), *((kind, None, "_current_level") for kind in KINDS)],
)
def test_without_internals(kind, scheme, missing, monkeypatch):
    module = make_module(kind, scheme=scheme, num_layers=2, bidirectional=True)
    x = torch.randn(4, 3, 5, requires_grad=scheme is None)

    def results():
        with torch.no_grad():
            without = flat_tensors(module(x))
        return [*without, *(flat_tensors(module(x)) if scheme else training_step(module, module, x))]

    expected = results()
    if missing == "COMPLETE":
        monkeypatch.setattr(internals, "COMPLETE", False)
        monkeypatch.setattr(internals, "_C", None)  # nothing of it is used
    else:
        monkeypatch.delattr(internals.forward_ad, missing)
    assert_equal(results(), expected)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: module(x)[0].sum())(x)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_transforms_are_refused(kind, transform):
    module, x, axis = make_module(kind), random_input(kind), int(kind in KINDS)
    calls = {
        "grad": lambda: torch.func.grad(lambda x: first_tensor(module(x)).sum())(x),
        "vmap": lambda: torch.func.vmap(lambda x: first_tensor(module(x)), in_dims=axis)(x),
    }
    said = rf"^blockcell\.torch\.{kind}: torch\.func's transforms do not go through it; .*restore$"
    with pytest.raises(RuntimeError, match=said):
        calls[transform]()
    y = first_tensor(torch.func.functional_call(module, dict(module.named_parameters()), (x,)))
    assert y.shape == (*x.shape[:-1], 8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # what PyTorch itself does on the way
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_forward_mode_is_refused(kind, frozen):
    """Above all it must not lose the derivatives in silence."""
    module, x = make_module(kind).requires_grad_(not frozen), random_input(kind)
    with forward_ad.dual_level():
        module(x)  # has no derivatives
        with pytest.raises(NotImplementedError, match=f"^blockcell.torch.{kind}: there are no forward-mode deriv"):
            module(forward_ad.make_dual(x, torch.ones_like(x)))


# ------------------------------------------------------------------------------------------ what a module is in PyTorch
@pytest.mark.parametrize("has_options", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_initial_values_and_state_dicts(kind, has_options):
    options = {"bias": False, "dtype": torch.float64} if has_options else {}
    if has_options and kind in KINDS:
        options |= {"num_layers": 3, "bidirectional": True}
    modules, drawn = [], []
    for package in (torch.nn, nn):
        torch.manual_seed(11)
        modules.append(getattr(package, kind)(4, 6, **options))
        drawn.append(torch.rand(3))
    theirs, ours = modules
    assert torch.equal(*drawn)
    assert repr(ours) == repr(theirs)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert_equal([*ours.state_dict().values()], [*theirs.state_dict().values()])
    assert all(type(p) is torch.nn.Parameter for p in ours.parameters())
    for a, b in ((theirs, ours), (ours, theirs)):
        a.reset_parameters()
        b.load_state_dict(a.state_dict())
        assert_equal([*b.parameters()], [*a.parameters()])


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_copies(kind, way):
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True} if kind in KINDS else {}
    module, x = make_module(kind, **options), random_input(kind)
    expected = first_tensor(module(x))
    other = CHANGES_OF_WEIGHTS[way](None, module)
    assert type(other) is type(module) and repr(other) == repr(module)
    assert torch.equal(first_tensor(other(x)), expected)
    weight = next(p for name, p in other.named_parameters() if name.startswith("weight_ih"))
    with torch.no_grad():
        weight.mul_(2)
    assert not torch.equal(first_tensor(other(x)), expected)
    assert torch.equal(first_tensor(module(x)), expected)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_weights_that_are_computed_at_each_call(kind):
    """By a parametrization, to whose parameters the gradients go."""
    module, x = make_module(kind), random_input(kind)
    hx = random_hx(kind, *([] if kind in CELLS else [1]), 3, 8)
    name = "weight_hh" if kind in CELLS else "weight_hh_l0"
    torch.nn.utils.parametrizations.weight_norm(module, name)
    with torch.no_grad():
        module.parametrizations[name].original0.mul_(3)
    theirs = getattr(torch.nn, kind)(5, 8)
    theirs.load_state_dict({name: getattr(module, name).detach() for name in theirs.state_dict()})
    found, expected = flat_tensors(module(x, hx)), flat_tensors(theirs(x, hx))
    torch.testing.assert_close([a.detach() for a in found], [a.detach() for a in expected])
    found[0].sum().backward()
    assert module.parametrizations[name].original1.grad.abs().sum() > 0


HALVES = torch.bfloat16, torch.float16
AUTOCAST = [  # autocast's dtype, x, hx; x in float64 and, but on some CPUs, float16 are errors in torch.nn
    (torch.bfloat16, torch.float32, None),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16, None),
    (torch.bfloat16, torch.float16, torch.bfloat16),
    (torch.float16, torch.float16, None),
    (torch.float16, torch.float16, torch.float32),
]
AUTOCAST_OF_CELLS = itertools.product(HALVES, (torch.float32, *HALVES), (None, torch.float32, *HALVES))


@pytest.mark.parametrize(
    "kind, packed, dtypes",
    [*itertools.product(KINDS, (False, True), AUTOCAST), *itertools.product(CELLS, (False,), AUTOCAST_OF_CELLS)],
)
def test_autocast(kind, packed, dtypes):
    """What is computed in float32 is rounded to the dtypes of torch.nn's results."""
    (dtype, of_x, of_hx), options = dtypes, {} if kind in CELLS else {"num_layers": 2}
    ours, theirs = make_module(kind, **options), getattr(torch.nn, kind)(5, 8, **options)
    x, hx, full = random_input(kind).to(of_x), None, None
    if of_hx is not None:
        states = torch.randn(2, *([] if kind in CELLS else [2]), 3, 8).to(of_hx)
        hx, full = hx_of(kind, states.unbind()), hx_of(kind, states.float().unbind())
    given = [rnn.pack_padded_sequence(a, [4, 3, 1]) if packed else a for a in (x, x.float())]
    expected = flat_tensors(ours(given[1], full))
    with torch.autocast("cpu", dtype=dtype):
        found, wanted = flat_tensors(ours(given[0], hx)), [a.dtype for a in flat_tensors(theirs(given[0], hx))]
    assert [a.dtype for a in found] == wanted
    assert_equal(found, [a.to(dtype) for a, dtype in zip(expected, wanted, strict=True)])
    sum(a.float().sum() for a in found).backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())
    assert all(p.grad.abs().sum() > 0 for name, p in ours.named_parameters() if kind in KINDS or name != "weight_hh")
    if of_x != torch.float32:
        with pytest.raises(ValueError, match="RNN input dtype"):
            ours(given[0])


def test_autocast_leaves_float64(dynamo):
    module, x = make_module("LSTM", dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(flat_tensors(module(x)), flat_tensors(module(x)))
        assert module(x)[0].dtype == torch.float64
        module = make_module("LSTM")
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_equal(flat_tensors(compiled(x.float())), flat_tensors(module(x.float())))


@pytest.mark.parametrize("kind, scheme", WITH_SCHEMES)
def test_any_memory_layout(kind, scheme):
    module = make_module(kind, 6, 8, scheme=scheme, bidirectional=True)
    x = torch.randn(4, 3, 6)
    hx = random_hx(kind, 2, 3, 8)
    expected = flat_tensors(module(x, hx))
    wide = torch.zeros(4, 3, 12)
    wide[:, :, ::2] = x
    turned = [a.transpose(0, 2).contiguous().transpose(0, 2) for a in ((hx,) if kind != "LSTM" else hx)]
    given = turned[0] if kind != "LSTM" else turned
    negative = torch.complex(x, -x).conj().imag  # PyTorch negates it when it reads it
    misaligned = torch.frombuffer(bytearray(1) + x.numpy().tobytes(), dtype=x.dtype, offset=1).view(x.shape)
    assert negative.is_neg() and misaligned.data_ptr() % 4
    for layout in (
        wide[:, :, ::2],
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.permute(2, 1, 0).clone().permute(2, 1, 0),
        negative,
        misaligned,
    ):
        assert torch.equal(layout, x)
        assert_equal(flat_tensors(module(layout, given)), expected)
    assert [a.shape for a in flat_tensors(module(x[:, :0]))][:2] == [(4, 0, 16), (2, 0, 8)]
    one = x[:1, :1].expand(4, 3, 6)
    assert_equal(flat_tensors(module(one, hx)), flat_tensors(module(one.contiguous(), hx)))


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_no_rows(kind):
    """A batch of none, as torch.nn has it."""
    results = []
    for package in (torch.nn, nn):
        module = getattr(package, kind)(5, 8, **({} if kind in CELLS else {"num_layers": 2}))
        x = torch.randn(*([] if kind in CELLS else [4]), 0, 5, requires_grad=True)
        tensors = flat_tensors(module(x))
        sum(tensor.sum() for tensor in tensors).backward()
        results.append([a.shape for a in (*tensors, x.grad)])
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_offloading(kind):
    """What is recomputed, or kept elsewhere, gives the same gradients."""
    module, x = make_module(kind, num_layers=2, bidirectional=True), torch.randn(4, 3, 5, requires_grad=True)
    expected = training_step(module, module, x)
    assert_equal(training_step(module, lambda x: checkpoint(module, x, use_reentrant=False), x), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_equal(training_step(module, module, x), expected)


# ------------------------------------------------------------------------------------------------------ what is kept
def saved_tensors(function):
    """Return what a function returns, and the tensors that are saved for its gradients."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = function()
    return output, saved


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_needed_is_kept(kind):
    module = make_module(kind, 64, 8)
    x = torch.randn(20, 3, 64)
    (y, _), kept = saved_tensors(lambda: module(x))
    parts = {"LSTM": 6, "GRU": 4, "RNN": 0}[kind]
    assert (
        sum(a.numel() for a in kept)
        == x.numel() + (1 + parts) * y.numel() + module.weight_ih_l0.numel() + module.weight_hh_l0.numel()
    )
    kept_at = {a.data_ptr() for a in kept}
    assert {x.data_ptr(), module.weight_ih_l0.data_ptr()} <= kept_at  # no copies
    assert y.data_ptr() not in kept_at  # the caller's, who may change it
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            (y, _), kept = saved_tensors(lambda: module(x))
        assert not kept and y.grad_fn is None and not y.requires_grad
    module.requires_grad_(False)
    (y, _), kept = saved_tensors(lambda: module(x))
    assert not kept and y.grad_fn is None
    x.requires_grad_()
    (y, _), kept = saved_tensors(lambda: module(x))
    assert x.data_ptr() not in {a.data_ptr() for a in kept}
    y.sum().backward()
    assert x.grad.abs().sum() > 0 and all(p.grad is None for p in module.parameters())


IN_PLACE = {
    "relu_": lambda y: y.relu_(),
    "+=": lambda y: y.__iadd__(1),
    "dropout": lambda y: torch.nn.functional.dropout(y, 0.5, inplace=True),
    "a part": lambda y: y[0].zero_(),
}


def grads_after_change(module, call, change, lengths=None):
    """Return the gradients if y and the last states are changed in place before they are computed."""
    module.zero_grad()
    torch.manual_seed(2)
    x = torch.randn(4, 3, 5, requires_grad=True)
    y, *last = flat_tensors(call(x if lengths is None else rnn.pack_padded_sequence(x, lengths)))
    for tensor in (y, *last):
        change(tensor)
    y.backward(torch.cos(y.detach()))
    return [x.grad, *(p.grad for p in module.parameters())]


def clone_results(output):
    """Clone y and the last states."""
    y, *last = (tensor.clone() for tensor in flat_tensors(output))
    return y, tuple(last)


@pytest.mark.parametrize("lengths", [None, [4, 4, 4], [4, 2, 1]], ids=["batch", "packed", "ragged"])
@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("kind", KINDS)
def test_results_may_be_changed_in_place(kind, change, lengths):
    for options in ({}, {"num_layers": 2, "bidirectional": True}):
        module = make_module(kind, **options)
        grads = grads_after_change(module, module, IN_PLACE[change], lengths)
        assert_equal(
            grads,
            grads_after_change(module, lambda x, module=module: clone_results(module(x)), IN_PLACE[change], lengths),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_results_may_be_changed_in_place(kind, dynamo):
    module = make_module(kind)
    expected = grads_after_change(module, lambda x: clone_results(module(x)), torch.relu_)
    assert_equal(grads_after_change(module, torch.compile(module, fullgraph=True), torch.relu_), expected)

    def change_results(x):
        y, last = module(x)
        return y.relu_(), last

    assert_equal(
        grads_after_change(module, torch.compile(change_results, fullgraph=True, backend="aot_eager"), lambda y: y),
        expected,
    )


def test_in_place_changes_of_what_is_needed_are_noticed():
    module, x = make_module("LSTM", num_layers=2), torch.randn(4, 3, 5)
    y, _ = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, _ = module(x)
    with torch.no_grad():
        module.weight_hh_l1.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y, _ = module(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_second_derivatives_are_refused(kind, compiled, monkeypatch):
    module, x = make_module(kind), random_input(kind, requires_grad=True)
    if compiled:
        monkeypatch.setattr("blockcell.torch.op.needs_dispatcher", lambda *tensors: True)
    y = first_tensor(module(x))
    expected = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(grad, expected)
    refusal = f"^blockcell.torch.{kind}: there are no second derivatives; use torch.nn.{kind}, see"
    with pytest.raises(RuntimeError, match=refusal):
        grad.square().sum().backward()


# ------------------------------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_threads_are_those_of_torch(scheme, monkeypatch):
    seen = []
    plan_layer = _kernels.plan_layer

    def record_threads(kind, task, sizes, threads, *options):
        if task == "forward":
            seen.append(threads)
        return plan_layer(kind, task, sizes, threads, *options)

    monkeypatch.setattr(_kernels, "plan_layer", record_threads)
    module, x = make_module("GRU", scheme=scheme), torch.randn(4, 3, 5)
    module._op._forward_plan.cache_clear()  # that of calls before
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        module(x)
    assert seen == [1, 3, 2]


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_forked_child(scheme):
    """It has one thread, and the same results."""
    code = f"""
import os
import signal
import torch
import blockcell.torch

torch.set_num_threads(2)
module, x = blockcell.torch.LSTM(64, 128).eval(), torch.randn(50, 32, 64)
blockcell.torch.replace(module, {scheme!r})
expected = module(x)[0].detach().numpy().tobytes()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if module(x)[0].detach().numpy().tobytes() == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert printed(code) == "0"


# ------------------------------------------------------------------------------------------------------------ refusals
X = torch.zeros(4, 3, 5)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_refused_by_the_constructor(kind):
    caller = f"blockcell.torch.{kind}"
    with refusal(f"ValueError: device is cuda; expected cpu, or use torch.nn.{kind}", caller):
        make_module(kind, 5, 8, device="cuda")
    with refusal("TypeError: dtype is torch.float16; expected torch.float32 or torch.float64", caller):
        make_module(kind, 5, 8, dtype=torch.float16)


def test_what_belongs_to_one_kind():
    with refusal("ValueError: proj_size is 2; expected 0, or an LSTM", "blockcell.torch.GRU"):
        make_module("GRU", 5, 8, proj_size=2)
    with refusal("ValueError: proj_size has to be smaller than hidden_size"):
        make_module("LSTM", 5, 8, proj_size=8)
    for kind, sizes in (("RNN", (5, 8, 2)), ("RNNCell", (5, 8, True))):
        with refusal("ValueError: nonlinearity is 'relu6'; expected 'tanh' or 'relu'", f"blockcell.torch.{kind}"):
            make_module(kind, *sizes, "relu6")
        theirs, ours = getattr(torch.nn, kind)(*sizes, "relu"), make_module(kind, *sizes, "relu")  # by position
        assert ours.nonlinearity == "relu" and repr(ours) == repr(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_refused_by_a_call(kind):
    prefix = f"blockcell.torch.{kind}: "
    number, pair = ("[0]", "a pair of tensors (h_0, c_0)") if kind == "LSTM" else ("", "a tensor")
    module, half, meta = make_module(kind), make_module(kind).half(), make_module(kind, 5, 8, device="meta")

    def as_hx(h):
        return (h, h) if kind == "LSTM" else h

    cases = [
        (half, (X.half(),), f"TypeError: {prefix}the weights are torch.float16; expected"),
        (module, (X.double(),), "ValueError: RNN input dtype (torch.float64) does not match weight dtype"),
        (module, (X.long(),), "ValueError: RNN input dtype (torch.int64) does not match weight dtype"),
        (module, (X.to("meta"),), f"ValueError: {prefix}input is on meta, the weights on cpu; expected cpu"),
        (meta, (X,), f"ValueError: {prefix}input is on cpu, the weights on meta; expected cpu"),
        (module, (X.numpy(),), f"TypeError: {prefix}input is of type ndarray; expected a tensor or"),
        (module, (X[None],), f"ValueError: {kind}: Expected input to be 2D or 3D, got 4D instead"),
        (module, (X[:, :, :3],), "RuntimeError: input.size(-1) must be equal to input_size. Expected 5, got"),
        (module, (X[:0],), "RuntimeError: Expected sequence length to be larger than 0 in RNN"),
        (module, (X, 3), f"TypeError: {prefix}hx is of type int; expected {pair}"),
        (module, (X, [X] * 3), f"TypeError: {prefix}hx is of type list; expected {pair}"),
        (module, (X, as_hx(X)), f"RuntimeError: Expected hidden{number} size (1, 3, 8), got [4, 3, 5]"),
        (module, (X[:, 0], as_hx(X)), f"RuntimeError: Expected hidden{number} size (1, 8), got [4, 3, 5]"),
        (module, (X, as_hx(torch.zeros(1, 3, 8).double())), "ValueError: RNN hx dtype (torch.float64) does not"),
        (module, (rnn.PackedSequence(X, torch.tensor([4])),), "RuntimeError: input must have 2 dimensions, got 3"),
    ]
    check_refused(cases)


def operators_and_inputs(kind):
    """Yield every operator of a kind, and inputs that it takes, by name."""
    cell, base = kind.endswith("Cell"), kind.removesuffix("Cell")
    module, n, rows = make_module(kind, 5, 8), 1 + (base == "LSTM"), (3,) if cell else (4, 3)
    weights = [p.detach() for p in module.parameters()]
    x, states = torch.randn(*rows, 5), [torch.zeros(*([3] if cell else [1, 3]), 8)] * n
    step_mask, reset = torch.zeros(2, 1 if cell else 4, 3, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.bool)
    op = module._op
    *outputs, tape = op.forward(x, weights, True, False, cell, states, step_mask)[: n + 2 - cell]
    first_inputs = {"x": x, "weights": weights}
    rest = {"bidirectional": False, "apart": cell, "states": states, "step_mask": step_mask}
    yield op._op, first_inputs | rest
    yield op._forward_op, first_inputs | {"keep": True} | rest
    saved = {"y": outputs[0], "tape": tape, "matrices": weights[:2], "grads": outputs}
    yield op._backward_op, saved | {"x": x, "needs_x": True, "bias": True, "states": states, "step_mask": step_mask}
    if base != "RNN":
        of_rows = {"lengths": None, "reset": None} if cell else {"lengths": torch.tensor([4, 2, 1]), "reset": reset}
        options = {"bidirectional": False, "states": states} | of_rows | {"scheme": "int8"}
        yield module._quantized_op._op, first_inputs | options


NAMES = {  # what a message calls a tensor in these lists
    "weights": r"weights|w_\w\w|b_\w\w|weight_\w+|bias_\w+",
    "matrices": r"matrices|w_\w\w",
    "states": "states|h|c",
    "grads": r"grads|[yhc]_grad",
}


def wrong_inputs(inputs):
    """Yield what is wrong, what a message about it must name, and the inputs.

    Where a size is wrong, that may be the name of another tensor, which no longer agrees with it.
    """
    of_any = "|".join(NAMES.get(name, name) for name in inputs)
    for name, value in inputs.items():
        tensors, called = value if isinstance(value, list) else [value], NAMES.get(name, name)
        if isinstance(value, list):
            counts = {len(value) - 1: value[:-1], len(value) + 1: value + value[-1:], 1: value[:1], 0: []}
            for count, others in counts.items():
                if count != len(value) and (count or name != "states"):  # no states are zeros
                    yield f"{count} {name}", called, inputs | {name: others}
        for k, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            ranks = {"rank 0": tensor.new_zeros(()), "one rank more": tensor[None], "a row less": tensor[:-1]}
            if tensor.dim() > 1:
                ranks |= {"one rank less": tensor[0], "rank 1": tensor.flatten(), "a column less": tensor[..., :-1]}
            for change, wrong in (ranks | {"int8": tensor.to(torch.int8), "half": tensor.half()}).items():
                others = [*tensors[:k], wrong, *tensors[k + 1 :]] if isinstance(value, list) else wrong
                yield f"{name} {k}, {change}", of_any if "less" in change else called, inputs | {name: others}


@pytest.mark.parametrize("where", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_operators_called_by_hand_name_what_is_wrong(kind, where):
    """A tensor of another rank, size or dtype, and another number of tensors: also without values."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    to = {"cpu": lambda a: a, "meta": lambda a: a.to("meta"), "fake": mode.from_tensor}[where]
    for operator, inputs in operators_and_inputs(kind):
        results = operator(*tree_map_only(torch.Tensor, to, tuple(inputs.values())))
        expected = operator(*inputs.values())
        assert [(a.shape, a.dtype) for a in results] == [(a.shape, a.dtype) for a in expected]
        count = 0
        for fault, called, wrong in wrong_inputs(inputs):
            given = tree_map_only(torch.Tensor, to, tuple(wrong.values()))
            with pytest.raises((ValueError, TypeError), match=rf"^blockcell\b.*\b({called})\b") as raised:
                operator(*given)
            assert "\n" not in str(raised.value), (str(operator), fault)
            count += 1
        assert count > 40


def shrink_storage(tensor, left, layout):
    """Return a tensor like this one in another layout, of whose storage so many bytes are left."""
    if layout == "with gaps":
        with_gaps = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        small = with_gaps[..., ::2].copy_(tensor.detach())
    else:  # a storage that no array has made fixed
        small = torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())
        small = torch._neg_view(small) if layout == "negated" else small
    small.untyped_storage().resize_(left)
    return small


SCHEMES = [None, "int8", "float16"]


def module_of_64_units(kind, scheme):
    """Make a module of 64 inputs and units, so that 64 bytes are too few for any tensor."""
    torch.manual_seed(3)
    module = getattr(torch.nn, kind)(64, 64).eval()
    nn.replace(module, scheme)
    return module


@pytest.mark.parametrize("left", [0, 64])
@pytest.mark.parametrize("kind, scheme", [(k, s) for k in (*KINDS, *CELLS) for s in SCHEMES if not s or k[0] != "R"])
def test_memory_that_is_gone(kind, scheme, left):
    """Tensors whose storage has been emptied or made too small are refused, in any layout, before anything reads it."""
    module, is_cell = module_of_64_units(kind, scheme), kind in CELLS
    x = torch.randn(*([] if is_cell else [4]), 3, 64)
    states = [torch.randn(*([] if is_cell else [1]), 3, 64) for _ in range(1 + kind.startswith("LSTM"))]

    def call_module(x, states):
        return module(x, tuple(states) if len(states) > 1 else states[0])

    match = f"^blockcell: .* has shape .*, but its storage has {left} bytes alone$"
    for layout in ("as it was", "with gaps", "negated"):
        for context in (torch.no_grad, *([torch.enable_grad] if scheme is None else [])):
            with context():
                with pytest.raises(ValueError, match=match):
                    call_module(shrink_storage(x, left, layout), states)
                for k in range(len(states)):
                    with pytest.raises(ValueError, match=match):
                        call_module(x, [*states[:k], shrink_storage(states[k], left, layout), *states[k + 1 :]])
                for weight in module.parameters():
                    whole, weight.data = weight.data, shrink_storage(weight, left, layout)
                    with pytest.raises(ValueError, match=match):
                        call_module(x, states)
                    weight.data = whole
    with torch.no_grad():
        call_module(x, states)


@pytest.mark.parametrize("left", [0, 64])
@pytest.mark.parametrize("kind, scheme", [(k, s) for k in KINDS for s in SCHEMES if not s or k != "RNN"])
def test_memory_that_pytorch_would_read(kind, scheme, left):
    """Of PackedSequences, their states, lengths, resets, and what autocast casts: by functions that look no better."""
    module, B = module_of_64_units(kind, scheme), 20
    lengths = torch.arange(1, B + 1).repeat(2)[:B] * 2
    packed = rnn.pack_padded_sequence(torch.randn(2 * B, B, 64), lengths, enforce_sorted=False)
    hx = random_hx(kind, 1, B, 64)
    match = f"^blockcell: {{}} has shape .*, but its storage has {left} bytes alone$"
    with torch.no_grad():
        module(packed, hx)
        for name in packed._fields:
            given = packed._replace(**{name: shrink_storage(getattr(packed, name), left, "as it was")})
            with pytest.raises(ValueError, match=match.format("input" if name == "data" else name)):
                module(given, hx)
        wrong = shrink_storage(hx[0] if kind == "LSTM" else hx, left, "as it was")
        with pytest.raises(ValueError, match=match.format("hx")):
            module(packed, (wrong, hx[1]) if kind == "LSTM" else wrong)
        for first in (False, True):
            module.batch_first = first
            reset = shrink_storage(torch.zeros(B, B, dtype=torch.bool), left, "as it was")
            with pytest.raises(ValueError, match=match.format("reset")):
                module(torch.randn(B, B, 64), reset=reset)
        for dtype in (torch.int64, torch.int16):
            wrong = shrink_storage(torch.zeros(20 * B, dtype=dtype), left, "as it was")
            with pytest.raises(ValueError, match=match.format("lengths")):
                module(torch.randn(20 * B, 4, 64), lengths=wrong)
        with torch.autocast("cpu"), pytest.raises(ValueError, match=match.format("input")):
            module(shrink_storage(torch.randn(4, B, 64).bfloat16(), left, "as it was"))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_others_take_meanwhile(kind):
    """Once tensors have been looked at, no storage can be resized, nor goes with its tensor."""
    module, x, hx = make_module(kind), torch.randn(4, 3, 5), random_hx(kind, 1, 3, 8)
    expected = [a.detach() for a in flat_tensors(module(x, hx))]
    weights, states = [p.detach().clone() for p in module.parameters()], list(hx) if kind == "LSTM" else [hx]
    given = [x, *weights, *states]
    outputs = [torch.empty(shape) for shape in [(4, 3, 8)] + len(states) * [(1, 3, 8)]]

    class Meddling:
        """What the call asks last, before the kernel runs."""

        def data_ptr(self):
            for tensor in given:
                with pytest.raises(RuntimeError, match="resiz"):
                    tensor.untyped_storage().resize_(0)
                shape = tensor.shape
                tensor.set_()
                torch.full(shape, np.nan)  # where memory that is freed would be taken from
            return outputs[0].data_ptr()

    plan = module._op._forward_plan(x.shape, weights[1].shape, 4, False, False, False, torch.float32, 1)
    plan.compute(x, weights, states, None, [Meddling(), *outputs[1:]])
    assert_equal(outputs, expected)
    assert not any(tensor.numel() for tensor in given)


# ---------------------------------------------------------------------------------------- PyTorch's exporters and tools
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("kind", ["LSTM", "GRUCell"])
def test_onnx_export_is_refused(kind, scheme, dynamo, tmp_path):
    """By both exporters, with what to do about it, and no more of it by torch.export."""
    pytest.importorskip("onnxscript")
    module = torch.nn.Sequential(getattr(torch.nn, kind)(5, 8)).eval()
    nn.replace(module, scheme)
    x, text = torch.zeros(3, 5) if kind == "GRUCell" else X, f"blockcell.torch.{kind}: torch.onnx.export has no "
    for context in (torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(RuntimeError, match=re.escape(text)) as raised:
            torch.onnx.export(module, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
        assert "call blockcell.torch.restore(model) before it" in str(raised.value)
    assert not list(tmp_path.iterdir())
    torch.export.export(module, (x,), strict=False)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning:torch.ao")
def test_quantize_dynamic_says_that_it_does_nothing():
    model = torch.nn.ModuleDict({"a": torch.nn.LSTM(5, 8), "b": torch.nn.GRUCell(5, 8), "c": torch.nn.Linear(8, 3)})
    nn.replace(model)
    quantize = torch.ao.quantization.quantize_dynamic
    for kinds in ({torch.nn.LSTM}, {torch.nn.Linear}, None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = quantize(model, kinds)
        texts = [str(each.message) for each in caught if "blockcell" in str(each.message)]
        assert [text.partition(" ")[0] for text in texts] == ["blockcell.torch.LSTM:", "blockcell.torch.GRUCell:"]
        for text in texts:
            assert "quantize='int8'" in text and "blockcell.torch.restore(model)" in text
        assert type(found["a"]) is nn.LSTM and not hasattr(found["a"], "qconfig")
        assert not hasattr(model["a"], "qconfig") and "qconfig" not in vars(model["b"])
    nn.replace(model, quantize="int8")  # is quantized already
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(model, {torch.nn.Linear})
    assert not [each for each in caught if "blockcell" in str(each.message)]
    nn.restore(model)
    assert type(quantize(model, {torch.nn.LSTM})["a"]) is not torch.nn.LSTM


# ---------------------------------------------------------------------------------------------------- replace, restore
class Own(torch.nn.LSTM):
    """A class of the user's."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.LSTM(5, 8, num_layers=2, batch_first=True)
        self.blocks = torch.nn.ModuleList([torch.nn.GRU(8, 8, batch_first=True), torch.nn.Linear(8, 8)])
        self.shared = self.blocks[0]
        self.projected = torch.nn.LSTM(5, 8, proj_size=3)
        self.small = torch.nn.GRU(5, 8).bfloat16()
        self.own = Own(5, 8)
        self.plain = torch.nn.RNN(5, 8)
        self.cells = torch.nn.ModuleList(getattr(torch.nn, kind)(5, 8) for kind in CELLS)

    def forward(self, x):
        return self.shared(self.blocks[0](self.encoder(x)[0])[0])


LEFT = {
    "small": "its weights are torch.bfloat16",
    "own": "Own is derived from LSTM, and may compute something else",
}


def test_replace_and_restore():
    torch.manual_seed(4)
    model = Model()
    called = []
    model.encoder.register_forward_hook(lambda module, inputs, output: called.append(type(module)))
    model.encoder.register_buffer("scale", torch.ones(1))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.dtype == torch.float32], lr=0.01)
    x = torch.randn(3, 4, 5)
    before, encoder = {name: id(p) for name, p in model.named_parameters()}, model.encoder
    expected = flat_tensors(model(x))

    report = nn.replace(model)
    changed = report.changed
    assert changed == {
        "encoder": "LSTM(5, 8, num_layers=2, batch_first=True)",
        "blocks.0": "GRU(8, 8, batch_first=True)",
        "projected": "LSTM(5, 8, proj_size=3)",
        "plain": "RNN(5, 8)",
        **{f"cells.{k}": f"{kind}(5, 8)" for k, kind in enumerate(CELLS)},
    }
    assert report.left == LEFT
    assert "replaced 7 modules:\n  encoder: LSTM(5, 8, num_layers=2, batch_first=True)\n" in repr(report)
    assert "left 2:\n  small: its weights are torch.bfloat16\n" in repr(report)
    assert model.encoder is encoder and type(encoder) is nn.LSTM and type(model.shared) is nn.GRU
    assert [type(cell) for cell in model.cells] == [getattr(nn, kind) for kind in CELLS]
    assert before == {name: id(p) for name, p in model.named_parameters()}
    for found, wanted in zip(flat_tensors(model(x)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert called == [torch.nn.LSTM, nn.LSTM]

    first = model(x)[0].square().sum()
    for _ in range(5):
        optimizer.zero_grad()
        model(x)[0].square().sum().backward()
        optimizer.step()
    assert model(x)[0].square().sum() < 0.9 * first
    again = nn.replace(model)
    assert not again.changed and again.left["encoder"] == "it is one already"

    trained = flat_tensors(model(x))
    report = nn.restore(model)
    assert report.changed.keys() == changed.keys() and "restored 7 modules" in repr(report)
    assert type(model.encoder) is torch.nn.LSTM and type(model.shared) is torch.nn.GRU
    assert model.encoder._weights_have_changed() is False
    assert [type(cell) for cell in model.cells] == [getattr(torch.nn, kind) for kind in CELLS]
    for found, wanted in zip(flat_tensors(model(x)), trained, strict=True):
        torch.testing.assert_close(found, wanted)
    copy.deepcopy(model)


def test_replace_the_model_itself_or_nothing():
    module = torch.nn.GRU(5, 8)
    report = nn.replace(module)
    assert type(module) is nn.GRU and repr(report) == "replaced 1 module:\n  (the model): GRU(5, 8)"
    nothing = "replaced 0 modules: the model has no module that is an LSTM, GRU or RNN"
    assert repr(nn.replace(torch.nn.Linear(2, 3))) == nothing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.nn.Sequential(torch.jit.script(torch.nn.LSTM(5, 8)))
    assert nn.replace(scripted).left == {"0": "it is compiled by torch.jit; do this before"}
    assert convert.from_torch(scripted, check=False).hidden_size == 8
    with refusal("TypeError: blockcell.torch.replace: model is of type dict; expected a torch.nn.Module"):
        nn.replace({})


def quantized_by_torch(kind):
    """Return a model with a module of this kind that PyTorch has quantized, and the module's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        model = torch.nn.Sequential(torch.nn.Linear(5, 5), getattr(torch.nn, kind)(5, 8))
        return torch.ao.quantization.quantize_dynamic(model, {type(model[1])})


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "GRUCell", "RNNCell"])
def test_replace_names_what_torch_has_quantized(kind):
    model = quantized_by_torch(kind)
    name = f"torch.ao.nn.quantized.dynamic.modules.rnn.{kind}"
    for quantize in (None, "int8"):
        text = nn.replace(model, quantize).left["1"]
        assert re.fullmatch(rf"it is {name}, .*quantize=False\), then replace\(model, quantize='int8'\)", text)
    report = nn.restore(model)
    assert report.left == {"1": f"it is {name}, for PyTorch's quantization"} and not report.changed
    with pytest.raises(ValueError, match=r"^from_torch: .* If PyTorch has quantized it: .*layer.quantize\('int8'"):
        convert.from_torch(model)
    for source in (torch.nn.Sequential(model[1], torch.nn.GRU(5, 6)), Holder(model[1])):
        with pytest.warns(UserWarning, match=r"^from_torch: left out: (0|inner)[. ]"):
            assert convert.from_torch(source).hidden_size == 6


class Holder(torch.nn.Module):
    """A module that has another one, and a GRU."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gru = inner, torch.nn.GRU(5, 6)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_replace_names_what_torch_is_to_quantize(bidirectional):
    """Once, with the cells that it consists of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        theirs = torch.ao.nn.quantizable.LSTM(5, 8, num_layers=2, bidirectional=bidirectional)
    for model, name in ((theirs, ""), (Holder(theirs), "inner")):
        left = nn.replace(model).left
        assert [*left] == [name] and left[name].startswith("it is torch.ao.nn.quantizable.modules.rnn.LSTM, for PyT")
    with pytest.raises(ValueError, match=r"^from_torch: .* If PyTorch has quantized it: "):
        convert.from_torch(theirs)


@pytest.mark.filterwarnings("ignore:The tensor attribute.* during export")
def test_exported_programs_are_no_modules(dynamo):
    program = torch.export.export(torch.nn.Sequential(torch.nn.LSTM(5, 8)), (torch.randn(6, 4, 5),))
    assert not nn.replace(program.module()).changed
    with pytest.raises(TypeError, match=r"is of type ExportedProgram; .*; pass program.module\(\) of a program"):
        convert.from_torch(program)
