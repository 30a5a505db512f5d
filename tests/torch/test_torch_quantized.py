"""`blockcell.torch.replace(model, quantize=...)`: always the bits of the quantized layer.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import copy
import gc
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bits import same
from peer_cases import parts_of, state_of
from refusals import refusal
from torch_cases import CHANGES_OF_WEIGHTS, MARKS, change_in_place

from blockcell import convert

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
internals = pytest.importorskip("blockcell.torch.internals")
quantized = pytest.importorskip("blockcell.torch.quantized")
rnn, forward_ad = torch.nn.utils.rnn, torch.autograd.forward_ad

pytestmark = MARKS
KINDS, SCHEMES = ["LSTM", "GRU"], ["int8", "float16"]
SMALL = torch.zeros(4, 3, 5)


@pytest.fixture
def layers_made(monkeypatch):
    """List the layers that are quantized from now on, for any module."""
    layers, from_torch = [], convert.from_torch
    monkeypatch.setattr(
        convert, "from_torch", lambda *args, **options: layers.append(from_torch(*args, **options)) or layers[-1]
    )
    return layers


def make_module(kind, *sizes, scheme="int8", training=False, **options):
    """Make a quantized module of a kind."""
    torch.manual_seed(3)
    module = getattr(torch.nn, kind)(*(sizes or (5, 8)), **options).train(training)
    nn.replace(module, scheme)
    return module


def random_call(g, module, B=None):
    """Draw an input, an hx and options of any form: what a module takes, and what the layer does."""
    T, B, inputs = int(g.integers(1, 12)), B or int(g.integers(1, 20)), module.input_size
    form = str(g.choice(["batched", "batched", "unbatched", "sorted", "unsorted", "equal"]))
    B = 1 if form == "unbatched" else B
    x, options = g.standard_normal((T, B, inputs)).astype(np.float32), {}
    if form == "batched":
        drawn = {"lengths": g.integers(0, T + 1, B), "reset": g.random((T, B)) < 0.2}
        options = {name: array for name, array in drawn.items() if g.integers(2)}
        if "lengths" in options:
            x[np.arange(T)[:, None] >= options["lengths"]] = np.nan
    module_input, module_options = torch.from_numpy(x), {}
    if form in ("sorted", "unsorted", "equal"):
        lengths = np.full(B, T) if form == "equal" else g.integers(1, T + 1, B)
        lengths = np.sort(lengths)[::-1].copy() if form == "sorted" else lengths
        module_input = rnn.pack_padded_sequence(
            module_input, torch.from_numpy(lengths), enforce_sorted=form != "unsorted"
        )
        x, options = x[: lengths.max()], {"lengths": lengths}
    elif form == "unbatched":
        module_input = module_input[:, 0]
    else:
        module_options = {name: torch.from_numpy(array) for name, array in options.items()}
        if module.batch_first:
            module_input = module_input.transpose(0, 1)
            if "reset" in options:
                module_options["reset"] = module_options["reset"].T
            if g.integers(2):
                module_input = module_input.contiguous()
    hx = state = None
    if g.integers(2):
        cells = module.num_layers * (1 + module.bidirectional)
        arrays = g.uniform(-0.8, 0.8, (1 + (module.mode == "LSTM"), cells, B, module.hidden_size)).astype(np.float32)
        state = state_of([*arrays.swapaxes(0, 1)], module.num_layers, 1 + module.bidirectional)
        tensors = [torch.from_numpy(array[:, 0] if form == "unbatched" else array) for array in arrays]
        hx = tuple(tensors) if module.mode == "LSTM" else tensors[0]
    return (module_input, hx, module_options), (x, state, options), form


def assert_bits(module, call, scheme):
    """Assert that y and the last states have the bits of the layer."""
    (module_input, hx, module_options), (x, state, options), form = call
    y, last = module(module_input, hx, **module_options)
    assert not y.requires_grad if form in ("batched", "unbatched") else not y.data.requires_grad
    if isinstance(y, rnn.PackedSequence):
        y = rnn.pad_packed_sequence(y)[0]
    elif form == "unbatched":
        y, last = y[:, None], tuple(a[:, None] for a in last) if module.mode == "LSTM" else last[:, None]
    elif module.batch_first:
        y = y.transpose(0, 1)
    layer = convert.from_torch({name: tensor.detach() for name, tensor in module.state_dict().items()}, check=False)
    expected, state = layer.quantize(scheme)(x, state, **options)
    assert same(y.numpy(), expected)
    last = [last] if module.mode == "GRU" else [*last]
    for k, part in enumerate(parts_of(state, module.num_layers, 1 + module.bidirectional)):
        assert same([a[k].numpy() for a in last], [*part])


# ---------------------------------------------------------------------------------------------------------------- bits
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_layer(kind, scheme, seed):
    for k in range(25):
        g = np.random.default_rng([seed, k])
        options = {name: bool(g.integers(2)) for name in ("bidirectional", "bias", "batch_first")}
        options |= {"num_layers": int(g.integers(1, 4)), "dropout": 0.5 * int(g.integers(2))}
        sizes, threads = [int(size) for size in g.integers((1, 1), (60, 90))], int(g.integers(1, 4))
        print(f"{k}: {sizes}, {options}, {threads=}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dropout of a single layer
            module = make_module(kind, *sizes, scheme=scheme, **options)
        torch.set_num_threads(threads)
        for _ in range(3):
            call = random_call(g, module)
            print(call[2], call[1][0].shape)
            with torch.set_grad_enabled(bool(g.integers(2))):
                assert_bits(module, call, scheme)


def change_while_replaced(g, module):
    """Change weights without PyTorch counting it while the module is PyTorch's or not quantized."""
    back = module.quantization
    (nn.restore if g.integers(2) else nn.replace)(module)
    assert "quantization" not in vars(module)
    module.weight_hh_l0.data.mul_(0.7)
    nn.replace(module, back)
    return module


def quantize_anew(g, module):
    """Change weights without PyTorch counting it, and quantize anew, as the documentation says."""
    module.bias_ih_l0.data.add_(0.1)
    assert nn.replace(module, module.quantization).left == {"": "it is one already"}
    return module


def quantize_by_random_scheme(g, module):
    """Quantize by one of the schemes."""
    nn.replace(module, SCHEMES[g.integers(len(SCHEMES))])
    return module


def cast_to_double_and_back(g, module):
    """Cast to float64 and back."""
    if g.integers(2):
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


CHANGES = CHANGES_OF_WEIGHTS | {
    "dtype": cast_to_double_and_back,
    "through others": change_while_replaced,
    "quantized anew": quantize_anew,
    "scheme": quantize_by_random_scheme,
}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_follow_the_weights(kind, seed):
    """Whatever is done to them, in any order, on any threads."""
    g = np.random.default_rng([seed, 1])
    module, seen = make_module(kind, 20, 33, num_layers=2, bidirectional=True), set()
    for k in range(160):
        change = str(g.choice([*CHANGES]))
        module = CHANGES[change](g, module)
        seen.add(change)
        print(f"{k}: {change}, {module}")
        torch.set_num_threads(int(g.integers(1, 4)))
        with torch.inference_mode(bool(g.integers(2))):
            for _ in range(int(g.integers(1, 3))):
                assert_bits(module, random_call(g, module), module.quantization)
    assert seen == {*CHANGES}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_turned_in_their_memory(kind):
    """The same address, and no change that PyTorch counts."""
    gates = {"LSTM": 4, "GRU": 3}[kind]
    module = make_module(kind, gates * 6, 6)
    x = torch.randn(3, 2, gates * 6)
    before = module(x)[0]
    module.weight_ih_l0.data = module.weight_ih_l0.data.t()
    expected = convert.from_torch(module).quantize("int8")(x.numpy())[0]
    assert same(module(x)[0].numpy(), expected) and not same(before.numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_made_under_inference_mode(kind, layers_made, seed):
    """PyTorch does not count how often they change."""
    g = np.random.default_rng([seed, 2])
    with torch.inference_mode():
        module = make_module(kind, 20, 33)
        assert module.weight_hh_l0.is_inference()
        for k in range(4):
            layers_made.clear()
            x = torch.from_numpy(g.standard_normal((3, 2, 20)).astype(np.float32))
            module(x), module(x)
            assert len(layers_made) == 1
            assert_bits(module, random_call(g, module), "int8")
            module.weight_hh_l0[k, k] += 0.5


def test_weights_are_quantized_once(layers_made):
    module, x = make_module("LSTM", 5, 8, num_layers=2, bidirectional=True), torch.randn(4, 3, 5)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        module(x), module(x[:1, :1]), module(rnn.pack_padded_sequence(x, [4, 2, 1]))
        with torch.no_grad():
            module.train()(x)
        module.eval()
    assert len(layers_made) == 2  # layers
    with torch.no_grad():
        module.bias_hh_l1_reverse += 1
    module(x), module(x)
    assert len(layers_made) == 3  # the other one has not changed
    module.load_state_dict(module.state_dict())
    module(x), module(x)
    assert len(layers_made) == 5


def test_nothing_outlives_the_weights():
    gc.collect()
    before = len(quantized._cache)
    module = make_module("GRU", 5, 8, num_layers=2)
    module(SMALL)
    other = copy.deepcopy(module)
    other(SMALL)
    assert len(quantized._cache) == before + 4
    del module
    gc.collect()
    assert len(quantized._cache) == before + 2
    other.weight_ih_l0 = torch.nn.Parameter(other.weight_ih_l0.detach().clone())
    assert len(quantized._cache) == before + 1
    nn.restore(other)
    assert len(quantized._cache) == before


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_computed_at_each_call(kind):
    """By a parametrization; nothing is kept of them."""
    gc.collect()
    module, x, before = make_module(kind), torch.randn(4, 3, 5), len(quantized._cache)
    torch.nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
    for _ in range(3):
        with torch.no_grad():
            module.parametrizations.weight_hh_l0.original0.mul_(1.2)
        weights = {name: getattr(module, name).detach() for name, _ in getattr(torch.nn, kind)(5, 8).named_parameters()}
        expected = convert.from_torch(weights, check=False).quantize("int8")(x.numpy())[0]
        y = module(x)[0]
        assert same(y.numpy(), expected) and not y.requires_grad and len(quantized._cache) == before


@pytest.mark.parametrize("kind", KINDS)
def test_many_python_threads(kind, seed):
    """They pack and read at the same time."""
    modules = [make_module(kind, 20, 33, num_layers=2, scheme=scheme) for scheme in SCHEMES]
    inputs = [torch.randn(5, B, 20) for B in (1, 3, 20)]
    expected = {}
    for module in modules:
        layer = convert.from_torch(module).quantize(module.quantization)
        expected |= {(module.quantization, k): layer(x.numpy())[0] for k, x in enumerate(inputs)}

    def calls(thread):
        g = np.random.default_rng([seed, thread])
        for _ in range(40):
            module, k = modules[g.integers(2)], int(g.integers(3))
            if g.random() < 0.2:
                quantized.forget(module.parameters())
            assert same(module(inputs[k])[0].detach().numpy(), expected[module.quantization, k])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(calls, range(8)))


@pytest.mark.parametrize("form", ["batched", "unsorted"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_in_training_without_gradients(kind, form, seed):
    """The numbers are drawn as by torch.nn: here of layers whose rounded weights it has too."""
    options = {"num_layers": 3, "dropout": 0.4, "bidirectional": True}
    ours = make_module(kind, 6, 16, scheme="float16", training=True, **options)
    theirs = getattr(torch.nn, kind)(6, 16, **options)
    rounded = convert.to_torch(convert.from_torch(ours).quantize("float16").dequantize())
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in rounded.items()})
    x = torch.randn(5, 4, 6)
    if form == "unsorted":
        x = rnn.pack_padded_sequence(x, [2, 5, 1, 4], enforce_sorted=False)
    results = []
    with torch.no_grad():
        for module in (ours, theirs):
            torch.manual_seed(seed)
            results.append(module(x)[0])
            assert not torch.equal(module(x)[0].data, results[-1].data)
    torch.testing.assert_close(results[0].data, results[1].data)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, given):
    module, x = make_module(kind, num_layers=2), torch.randn(4, 3, 5).to(given)
    theirs = getattr(torch.nn, kind)(5, 8, num_layers=2)
    y, _ = module(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found, dtype = module(x), theirs(x)[0].dtype
    assert found[0].dtype == dtype and torch.equal(found[0], y.to(dtype))


# -------------------------------------------------------------------------------------------------- compiled, exported
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, backend, dynamo, layers_made):
    """In one graph; what is quantized is that of eager calls, and follows the weights."""
    module = make_module(kind, num_layers=2, bidirectional=True, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for k, (B, T) in enumerate(((3, 4), (5, 4), (2, 7), (2, 7))):  # sizes become symbols
        x = torch.randn(B, T, 5)
        with torch.set_grad_enabled(k < 3):
            y, last = compiled(x)
            expected, expected_last = module(x)
        assert torch.equal(y, expected) and not y.requires_grad
        assert all(map(torch.equal, last, expected_last))
        if k == 2:
            assert len(layers_made) == 2
            change_in_place(np.random.default_rng(1), module)
    assert len(layers_made) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_operators_pass_opcheck(kind):
    module = make_module(kind, 5, 8, bidirectional=True)
    weights, states = [p.detach() for p in module.parameters()], [torch.randn(2, 3, 8)] * (1 + (kind == "LSTM"))
    start = torch.tensor([[False, True, False]] * 4)
    for given, lengths, reset in (([], None, None), (states, torch.tensor([4, 0, 2]), start)):
        torch.library.opcheck(module._quantized_op._op, (SMALL, weights, True, given, lengths, reset, "int8"))
    with pytest.raises(ValueError, match="expected"):
        module._quantized_op._op(SMALL, weights, True, [], None, None, "int4")


# ------------------------------------------------------------------------------------------------------------ refusals
TRAINING = (
    "blockcell.torch.{kind}: it is in training mode with gradients enabled, and weights quantized to int8 have no"
    " gradient; for inference call model.eval(), or compute under torch.no_grad(); to train call"
    " blockcell.torch.replace(model) without quantize"
)
REQUIRES = (
    "blockcell.torch.{kind}: input or hx requires a gradient, and weights quantized to int8 are for inference alone;"
    " compute under torch.no_grad(), or call blockcell.torch.replace(model) without quantize"
)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_refused(kind):
    """But y without one is not, of frozen weights in training neither."""
    module, x = make_module(kind, training=True), torch.randn(4, 3, 5)
    h = torch.zeros(1, 3, 8, requires_grad=True)
    hx = (torch.zeros(1, 3, 8), h) if kind == "LSTM" else h
    with pytest.raises(RuntimeError, match=f"^{re.escape(TRAINING.format(kind=kind))}$"):
        module(x)
    with torch.no_grad():
        expected = module(x)[0]
        module(x.clone().requires_grad_(), hx)
    module.eval()
    y = module(x)[0]
    assert not y.requires_grad and torch.equal(y, expected)
    for given in ((x.clone().requires_grad_(),), (x, hx)):
        with pytest.raises(RuntimeError, match=f"^{re.escape(REQUIRES.format(kind=kind))}$"):
            module(*given)
    assert not module.train().requires_grad_(False)(x)[0].requires_grad
    nn.replace(module.requires_grad_())
    module(x)[0].sum().backward()
    assert module.weight_hh_l0.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # what PyTorch itself does on the way
@pytest.mark.parametrize("kind", KINDS)
def test_other_derivatives_are_refused(kind):
    module, x = make_module(kind), torch.randn(4, 3, 5)
    calls = {
        "a transform": lambda: torch.func.vmap(lambda x: module(x)[0], in_dims=1)(x),
        "input or hx": lambda: torch.func.grad(lambda x: module(x)[0].sum())(x),
    }
    for what, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^blockcell\.torch\.{kind}: {what} .* without quantize$"):
            call()
    with forward_ad.dual_level():
        module(x)  # has no derivatives
        with pytest.raises(RuntimeError, match=rf"^blockcell\.torch\.{kind}: .* forward-mode derivative"):
            module(forward_ad.make_dual(x, torch.ones_like(x)))
    own = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert torch.equal(torch.func.functional_call(module, own, (x,))[0], module(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_refused_weights(kind):
    prefix = f"blockcell.torch.{kind}: "
    expected = "expected torch.float32: call model.float(), or blockcell.torch.replace(model) without quantize"
    double = f"{prefix}quantization is 'int8' and the weights are torch.float64; {expected}"
    with pytest.raises(TypeError, match=f"^{re.escape(double)}$"):
        make_module(kind).double()(SMALL.double())
    with pytest.raises(TypeError, match=f"{prefix}the weights are torch.float16; expected torch.float32 or"):
        make_module(kind).half()(SMALL.half())
    with pytest.raises(ValueError, match=f"{prefix}input is on cpu, the weights on meta; expected cpu"):
        make_module(kind, device="meta")(SMALL)
    module = make_module(kind)
    module.weight_ih_l0.data[1, 2] = np.nan
    with pytest.raises(ValueError, match=f"^{prefix}its weights cannot be quantized to int8: .* is nan; expected"):
        module(SMALL)
    module = make_module(kind, scheme="float16")
    module.weight_ih_l0.data[1, 2] = 1e6
    with pytest.raises(ValueError, match=rf"^{prefix}its weights cannot be quantized to float16: .* is 1e\+06; exp"):
        module(SMALL)


# ---------------------------------------------------------------------------------------------------- replace, restore
def test_reports():
    model = torch.nn.ModuleDict({"a": torch.nn.LSTM(5, 8), "b": torch.nn.GRU(5, 8), "c": torch.nn.GRU(5, 8).double()})
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    report = nn.replace(model, quantize="int8")
    shown = "5, 8, quantization='int8'"
    assert report.changed == {"a": f"LSTM({shown})", "b": f"GRU({shown})"}
    assert report.left == {"c": "its weights are torch.float64; to be quantized to int8 they have to be torch.float32"}
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert {*nn.replace(model, quantize="int8").left} == {"a", "b", "c"}
    assert nn.replace(model, quantize="float16").changed["b"] == "GRU(5, 8, quantization='float16')"
    assert nn.replace(model).changed == {"a": "LSTM(5, 8)", "b": "GRU(5, 8)", "c": "GRU(5, 8)"}
    nn.replace(model, "int8")
    assert nn.restore(model).changed == {"a": "LSTM(5, 8)", "b": "GRU(5, 8)", "c": "GRU(5, 8)"}
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before
    assert vars(model["a"]).keys() == vars(torch.nn.LSTM(5, 8)).keys()


def test_schemes_by_the_names_of_modules():
    """The longest name counts; what has none is not quantized."""
    inner = torch.nn.ModuleDict({"a": torch.nn.LSTM(5, 8), "b": torch.nn.GRU(5, 8), "c": torch.nn.LSTMCell(5, 8)})
    model = torch.nn.ModuleDict({"x": inner, "y": torch.nn.LSTM(5, 8).double(), "xb": torch.nn.GRU(5, 8)})
    report = nn.replace(model, quantize={"x": "int8", "x.b": "float16", "x.c": "float32"})
    assert report.left == {}
    found = {name: module.quantization for name, module in model.named_modules() if name in report.changed}
    assert found == {"x.a": "int8", "x.b": "float16", "x.c": None, "y": None, "xb": None}
    assert nn.replace(model, quantize={"": "int8", "y": "float32", "x.b": "float16"}).left == {
        "x.a": "it is one already",
        "x.b": "it is one already",
        "y": "it is one already",
    }
    assert model["xb"].quantization == model["x"]["c"].quantization == "int8"


@pytest.mark.parametrize(
    ("quantize", "said"),
    [
        ("int4", "ValueError: blockcell.torch.replace: quantize is 'int4'; expected one of 'float16', 'int8'"),
        (8, "TypeError: blockcell.torch.replace: quantize is 8; expected one of 'float16', 'int8'"),
        ({"": "int4"}, "ValueError: blockcell.torch.replace: quantize[''] is 'int4'; expected one of 'float16'"),
        ({"a": "int8"}, "ValueError: blockcell.torch.replace: quantize has the key 'a'; expected ''"),
    ],
)
def test_refused_by_replace(quantize, said):
    module = torch.nn.LSTM(5, 8)
    with refusal(said):
        nn.replace(module, quantize)
    assert type(module) is torch.nn.LSTM
