"""The graphs on onnxruntime's WebGPU provider, through sessions: every output of every call against float64.

`python tools/webgpu.py` runs this with both packages that have the provider, on every GPU that it finds; most of
them are programs that compute on the CPU. The bounds are those of the other runtimes, for stacks of layers too.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
from cases import SIZES, arguments, rng
from export_cases import LAYERS, STREAMING, B, Case, I, T, drawn, exported, flat, random_layers, random_state
from graphs import (
    EPS,
    FORMS,
    LOOPS,
    SEQUENCES,
    attributes,
    attributes_of,
    exact,
    poisoned,
    same_in_threads,
)
from training_cases import LOSSES, OPTIMIZERS, Training

import onnx_export
from blockcell import GRU, LSTM, RNN, Bidirectional, Stack
from blockcell.formulas import error_in_eps
from blockcell.optable import OPS
from onnx_export.runtime import CONTROL_FLOW, why_no_dtype, why_not
from onnx_export.verification import CHAIN

pytestmark = [pytest.mark.webgpu, pytest.mark.filterwarnings("ignore:.*its steps run in a")]  # forms that are slow

DTYPES = ["float32", "float16"]
BUILT_IN = "WebGpuExecutionProvider" in onnxruntime.get_available_providers()  # which has no GRU
RANDOM_OPS, RANDOM_LAYERS = 80, 60  # cases; so many layers with lengths, and so many without

compared: list[tuple[float, str]] = []  # every output: its error in parts of what is allowed, and in words


@pytest.fixture(scope="module", autouse=True)
def _gpu(record_testsuite_property):
    """Skips all where there is no GPU; in the end tells `tools/webgpu.py` what was compared."""
    if reason := why_not("webgpu"):
        pytest.skip(reason)
    alive = onnx_export.Session("GRUBlockCell", provider="webgpu")  # shaders stay compiled as long as a session lives
    alive(**arguments("GRUBlockCell"))
    yield
    record_testsuite_property("compared", len(compared))
    record_testsuite_property("worst", max(compared, default=(0.0, ""))[1])


def bound_of(dtype, sequence=True, terms=0):
    """In eps of an output's largest entry. ``terms`` is I + H: a sum of so many is rounded with the root of them."""
    return (24 if sequence and dtype == "float32" else 8) * max(1.0, (terms / CHAIN) ** 0.5)


@pytest.fixture
def compare(request):
    """Compares all outputs, by name, with ``computed()``: the results in float64, or what they are if a function
    changes the numbers given."""

    def check(found, computed, bound, dtype="float32"):
        expected = computed()
        assert list(found) == list(expected)
        for name, right in expected.items():
            result = found[name]
            assert result.dtype == dtype and result.shape == right.shape, name
            eps = EPS[np.dtype(dtype)]
            error, allowed = error_in_eps(result, right, eps), bound
            if error > bound:  # float16 has numbers so small that they have few digits
                spacing = np.finfo(dtype).smallest_subnormal / (eps * (np.abs(right).max() or 1))
                allowed = max(moved(computed, name, eps), spacing)
            said = f"{error:.2f} of {allowed:.0f} eps in {name} of {request.node.name}"
            compared.append((error / allowed if error else 0.0, said))
            assert error <= allowed, said

    return check


def moved(computed, name, eps):
    """How far a result moves, in eps of its largest entry, if all numbers given move by an eps, of their array's
    largest entry or of 1.

    That exceeds the bound where sums cancel and no entry is large, as with one cell and one row. Then no algorithm does
    better; nor does WebGPU's tanh, which is off by an eps of 1 even where it is small.
    """
    right, most = computed()[name], 0.0
    for number in range(32):
        g = rng("moved", number)

        def change(array, g=g):
            return array + eps * np.nanmax(np.abs(array), initial=1.0) * g.choice([-1.0, 1.0], array.shape)

        most = max(most, error_in_eps(computed(change)[name], right, eps))
    return most


def skip_without(dtype):
    if reason := why_no_dtype("webgpu", np.dtype(dtype)):
        pytest.skip(reason)


def check_op(compare, session, op, args, terms=0):
    """The op on these arguments, with NaN where nothing may be read."""
    dtype = args[OPS[op].inputs[0].name].dtype.name
    given = poisoned(op, args) if OPS[op].sequence else args
    found = session(**given)

    def computed(change=lambda array: array):
        floats = {tensor.name: change(args[tensor.name].astype(np.float64)) for tensor in OPS[op].inputs}
        return exact(op, args | floats)._asdict()

    compare(found._asdict(), computed, bound_of(dtype, OPS[op].sequence, terms), dtype)


def check_layer(compare, case, model):
    found = onnx_export.Session(model, provider="webgpu")(**case.arguments)
    dtype = case.layer.dtype.name
    compare(case.by_name(found), case.computed, bound_of(dtype), dtype)


# ------------------------------------------------------------------------------------------------------------------ ops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_ops(compare, op, loop, dtype):
    """Every seq_len_max in a session, from the longest to none and back: nothing may be left of an earlier call."""
    skip_without(dtype)
    g = rng("webgpu", op, loop, dtype)
    for attrs in attributes_of(op):
        sizes = {letter: int(g.integers(1, most)) for letter, most in {"T": 9, "B": 6, "I": 8, "H": 10}.items()}
        print(sizes, attrs)
        fixed = {"sizes": {"T": sizes["T"]}} if loop == "unroll" else {}
        session = onnx_export.Session(op, provider="webgpu", dtype=dtype, loop=loop, attrs=attrs, **fixed)
        for n in [*range(sizes["T"], -1, -1), sizes["T"]] if OPS[op].sequence else [None]:
            options = {"use_peephole": False, **attrs}
            check_op(compare, session, op, arguments(op, sizes, dtype=np.dtype(dtype), seq_len_max=n, **options))


@pytest.mark.parametrize("op", OPS)
def test_the_form_that_nobody_chose(compare, op):
    """Has no loop, which the CPU would run."""
    for attrs in attributes_of(op):
        session = onnx_export.Session(op, provider="webgpu", attrs=attrs)
        check_op(compare, session, op, arguments(op, **{"use_peephole": False, **attrs}))
        assert not {placed.op_type for placed in session.placement} & CONTROL_FLOW


@pytest.mark.parametrize("steps", [50, 200])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("op", SEQUENCES)
def test_many_steps(compare, op, loop, steps):
    sizes = {"T": steps, "B": 2, "I": 3, "H": 4}
    for attrs in attributes_of(op):
        session = onnx_export.Session(op, provider="webgpu", loop=loop, attrs=attrs, sizes={"T": steps})
        args = arguments(op, sizes, seq_len_max=steps - 3, **{"use_peephole": False, **attrs})
        check_op(compare, session, op, args)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("letters", ["T", "B", "I", "H", "BH", "TB", "TBIH"])
@pytest.mark.parametrize(("op", "loop"), FORMS)
def test_sizes_of_zero_and_one(compare, op, loop, letters, size):
    sizes = SIZES | dict.fromkeys(letters, size)
    args = arguments(op, sizes, use_peephole="wci_grad" in OPS[op].result._fields)
    session = onnx_export.Session(op, provider="webgpu", loop=loop, attrs=attributes(op, args), sizes={"T": sizes["T"]})
    check_op(compare, session, op, args)


@pytest.mark.parametrize("op", OPS)
def test_wide(compare, op):
    """Long sums; more than a workgroup of every size."""
    for sizes in ({"T": 3, "B": 5, "I": 200, "H": 184}, {"T": 2, "B": 33, "I": 65, "H": 70}):
        args = arguments(op, sizes, use_peephole=True)
        session = onnx_export.Session(op, provider="webgpu", attrs=attributes(op, args))
        check_op(compare, session, op, args, terms=sizes["I"] + sizes["H"])


# --------------------------------------------------------------------------------------------------------------- layers
FULL = {"no state": {"lengths": False, "state": False}, "reset": {"lengths": False, "reset": True}}
RAGGED = {"lengths": {"lengths": True}, "lengths and reset": {"lengths": True, "reset": True}}


def fixed_sizes(loop, steps=T):
    """Those that a model must know. onnxruntime does not see the shapes of what a Loop gives: if another cell reads it
    and T is free, sizes are left to be computed at run time, which brings nodes to the CPU, and the session refuses.
    """
    return {} if loop == "scan" else {"T": steps}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("form", [*FULL, *RAGGED])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(compare, name, loop, form, train, dtype):
    """Padding is NaN."""
    skip_without(dtype)
    case = Case(LAYERS[name](dtype), train=train, **(FULL | RAGGED)[form])
    check_layer(compare, case, exported(case.layer, case, loop=loop, static=True, sizes=fixed_sizes(loop)))


@pytest.mark.parametrize("form", ["no state", "lengths"])
@pytest.mark.parametrize("name", ["LSTM", "LSTM with peephole", "LSTM coupled", "GRU", "GRU after", "Bidirectional"])
def test_native_layers(compare, name, form):
    made = {
        "LSTM with peephole": lambda dtype: drawn(LSTM.init(I, 5, seed=0, use_peephole=True, gate_order="ifco")),
        "LSTM coupled": lambda dtype: drawn(LSTM.init(I, 5, seed=0, coupled=True, activation="relu")),
    }
    case = Case((LAYERS | made)[name]("float32"), **(FULL | RAGGED)[form])
    model = exported(case.layer, case, loop="native")
    if BUILT_IN and not name.startswith("LSTM"):
        with pytest.raises(RuntimeError, match=r"would run GRU .* on the CPU"):
            onnx_export.Session(model, provider="webgpu")(**case.arguments)
        return
    check_layer(compare, case, model)


@pytest.mark.parametrize("form", ["no state", "lengths and reset"])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 0, 2, 2), (3, 2, 0, 2), (3, 2, 2, 0), (1, 2, 3, 1), (2, 0, 0, 0)])
@pytest.mark.parametrize(
    "kind", [LSTM.init, GRU.init, partial(GRU.init, reset_after=True), RNN.init], ids=["LSTM", "GRU", "after", "RNN"]
)
def test_layers_of_zero_and_one(compare, kind, sizes, loop, train, form):
    steps, rows, inputs, cells = sizes
    both = Bidirectional(*(drawn(kind(inputs, cells, seed=seed)) for seed in (1, 2)))
    layer = Stack([both, drawn(kind(2 * cells, cells, seed=3))])
    case = Case(layer, train=train, sizes=(steps, rows), **(FULL | RAGGED)[form])
    check_layer(compare, case, exported(layer, case, loop=loop, sizes=fixed_sizes(loop, steps)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STREAMING)
def test_steps_of_a_stream(compare, name, dtype):
    """The states that one step gives are those before the next one."""
    skip_without(dtype)
    layer = STREAMING[name](dtype)
    g = rng("webgpu stream", name, dtype)
    x, state = g.uniform(-1, 1, (20, B, I)).astype(dtype), random_state(layer, g)
    stream = Case.exactly(layer).stream(batch=B)
    (stream.state,) = Case.double(state)
    session = onnx_export.Session(onnx_export.export(layer, None, streaming=True), provider="webgpu")
    rows = []
    for x_t in x:
        y, state = session(x=x_t, state=state)
        rows.append(y)
    expected = {"y": stream.run(x.astype(np.float64))} | flat(layer, stream.state)
    compare({"y": np.stack(rows)} | flat(layer, state), lambda: expected, bound_of(dtype), dtype)


# ------------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("name", "criterion", "optimizer"),
    [
        ("LSTM with all", "softmax_cross_entropy", "adam"),
        ("GRU after", "mean_squared_error", "momentum"),
        ("Classifier", "softmax_cross_entropy", "sgd"),
        ("Both ends", "mean_squared_error", "adam"),
    ],
)
def test_training_steps(compare, name, criterion, optimizer, loop, dtype):
    """Two steps: the second is of the weights, and of what the optimizer keeps, that the first left on the GPU."""
    skip_without(dtype)
    training = Training(LAYERS[name](dtype), criterion, optimizer, reset=True, mask=True, state=True, max_norm=0.5,
                        **OPTIMIZERS[optimizer])  # fmt: skip
    session = onnx_export.TrainingSession(training.model(loop=loop, static=True), training.layer, provider="webgpu")
    state = training.state
    for number in range(2):
        batch, weights, memory = training.batch(number), session.weights, session.optimizer_state
        result = session(**batch, state=state, learning_rate=training.rate)

        def computed(change=lambda array: array, before=(batch, weights, memory, state)):
            found = training.step(*before, change)
            return {key: right for key, right in found.items() if key != "new_step"}

        found = {"loss": np.float32(result.loss), "norm": np.float32(result.norm), "y": result.y}
        found |= flat(training.layer, result.state)
        after = session.weights | session.optimizer_state
        assert after.pop("step", number + 1) == number + 1
        found |= {f"new_{key}": array for key, array in after.items()}
        wide = {key: np.asarray(array, dtype) for key, array in found.items()}  # what is float32 has the same bound
        compare(wide, computed, bound_of(dtype), dtype)
        state = result.state


def test_training_keeps_its_weights_on_the_gpu():
    """But for the number of steps; a model with free sizes has a graph for each set of them."""
    layer = Training(LAYERS["Classifier"]("float32"), LOSSES[0], "adam").layer
    options = {"loss": LOSSES[0], "optimizer": "adam", "provider": "webgpu", "sizes": {"T": T}}
    session = onnx_export.TrainingSession(onnx_export.training_step(layer, None, **options), layer, provider="webgpu")
    for rows in (B, 2, B):
        session(x=np.ones((T, rows, I), np.float32), target=np.zeros(rows, int))
    places = {name: value.device_name() for name, value in session._kept.inputs.items()}
    assert {places[name] for name in places if name != "step"} == {"cpu" if BUILT_IN else "webgpu"}
    assert session.optimizer_state["step"] == 3 and places["step"] == "cpu" and len(session._running) == 2
    session(x=np.ones((T, 0, I), np.float32), target=np.zeros(0, int))  # which runs nothing there
    session(x=np.ones((T, B, I), np.float32), target=np.zeros(B, int))
    assert session.optimizer_state["step"] == 5 and len(session._running) == 2


# --------------------------------------------------------------------------------------------------------------- random
@pytest.mark.parametrize("case", range(RANDOM_OPS))
def test_random_ops(compare, case, seed):
    g = rng("webgpu ops", seed, case)
    op = str(g.choice(list(OPS)))
    sizes = {letter: int(g.integers(1, most)) for letter, most in {"T": 30, "B": 9, "I": 40, "H": 40}.items()}
    drawn_attrs = {
        "use_peephole": bool(g.integers(2)),
        "cell_clip": float(g.choice([0.0, 0.2, 1.0])),
        "forget_bias": float(g.choice([0.0, 0.6])),
        "activation": str(g.choice(["tanh", "relu", "elu", "softsign", "hard_sigmoid"])),
    }
    dtype = str(g.choice([dtype for dtype in DTYPES if not why_no_dtype("webgpu", np.dtype(dtype))]))
    options = {"functions": bool(g.integers(2)), "opset": int(g.integers(15, 22))}
    args = arguments(op, sizes, dtype=np.dtype(dtype), seq_len_max=int(g.integers(sizes["T"] + 1)), seed=case,
                     **drawn_attrs)  # fmt: skip
    loop = str(g.choice(LOOPS))
    print(f"{op} {sizes} {attributes(op, args)} {dtype} {loop} {options}")
    session = onnx_export.Session(op, provider="webgpu", dtype=dtype, attrs=attributes(op, args), loop=loop,
                                  sizes={"T": sizes["T"]}, **options)  # fmt: skip
    check_op(compare, session, op, args)


@pytest.mark.parametrize("lengths", [False, True], ids=["full", "lengths"])
@pytest.mark.parametrize("number", range(RANDOM_LAYERS))
def test_random_layers(compare, number, lengths, seed):
    g = rng("webgpu layers", seed, number, lengths)
    dtype = str(g.choice([dtype for dtype in DTYPES if not why_no_dtype("webgpu", np.dtype(dtype))]))
    layers = random_layers(g, int(g.integers(1, 20)), dtype, 20)
    layer = layers[0] if len(layers) == 1 else Stack(layers)
    sizes = int(g.integers(1, 20)), int(g.integers(1, 8))
    reset, state, train, functions = map(bool, g.integers(2, size=4))
    loop = str(g.choice(LOOPS))
    options = {"lengths": lengths, "reset": reset, "state": state, "train": train}
    print(f"{layer!r} T, B = {sizes} {options} {loop} functions={functions}")
    case = Case(layer, sizes=sizes, seed=number, **options)
    model = exported(layer, case, loop=loop, static=True, functions=functions, sizes=fixed_sizes(loop, sizes[0]))
    check_layer(compare, case, model)


# ------------------------------------------------------------------------------------------------------------- the rest
def test_a_float_on_the_cpu_is_refused():
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[2,2] a) => (float b) { b = Det (a) }'
    )
    with pytest.raises(RuntimeError, match="would run Det b of g on the CPU"):
        onnx_export.Session(model, provider="webgpu")


def activations(numbers):
    """onnxruntime's Tanh and Sigmoid, and the right ones."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[N] a) => (float[N] tanh, float[N] sigmoid) { tanh = Tanh (a)  sigmoid = Sigmoid (a) }""")
    a = np.array(numbers, np.float32).astype(np.float64)
    return onnx_export.Session(model, provider="webgpu")(a=a.astype(np.float32)), (np.tanh(a), 1 / (1 + np.exp(-a)))


def test_activations_beside_1():
    for result, right in zip(*activations([*np.linspace(-12, 12, 100_001), -80, 80, -np.inf, np.inf]), strict=True):
        assert np.abs(result - right).max() <= 2 * EPS[np.dtype(np.float32)]


@pytest.mark.xfail(reason="onnxruntime's Tanh on WebGPU is right beside 1 only, as the two tests say")
def test_tanh_of_small_numbers():
    (result, _), (right, _) = activations([0.1, 0.01, 0.001, 0.0001])
    assert np.abs(result / right - 1).max() <= 24 * EPS[np.dtype(np.float32)]


@pytest.mark.parametrize("op", ["BlockLSTM", "BlockLSTMGrad"])
def test_eight_threads(op):
    """Without a lock that all sessions share they end the process."""
    assert same_in_threads(op, "webgpu", 10)
