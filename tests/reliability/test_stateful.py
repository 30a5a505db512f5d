"""Whatever is done with streams, layers, sessions and scorers, in any order and on any threads: the bits of the plain
layer on one.

Hypothesis draws a layer, its sizes and a sequence of calls, good and bad. The model of a stream, and of a layer
quantized to float16, is the (dequantized) layer called for one step after the other on one thread, with its state as
arrays; of one quantized to int8 it is that layer, called so and with plain C's products. The model of a layer is a copy
that uses one thread.
After every call the whole state is compared. `make test-all` tries many more.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from bits import CACHES, GRIDS, back_off, leaves, like, on_threads, same, use_grid, with_machine, zeros
from forms import backwards, byte_swapped, misaligned, read_only, strided
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scoring import alone

import blockcell
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Stack, _cpu, _integer, _kernels, _team
from blockcell.activations import PARAMETERS
from blockcell.optable import ACTIVATIONS

REFUSED = (TypeError, ValueError)
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = [np.float32, np.float32, np.float64, np.float16]  # twice the usual one
THREADS = [1, 2, 3, 8]
SCHEMES = [None, "float16", "int8"]  # of quantization
WAYS = st.sampled_from(_integer.available_instruction_sets())  # of products in integers
LEVELS = st.sampled_from(_kernels.available_levels())
PROCESSES = st.fixed_dictionaries(
    {"threads": st.sampled_from(THREADS), "way": WAYS, "level": LEVELS, "caches": st.sampled_from(CACHES)}
)
# A single step packs its weights before it uses them from 16 rows a thread on (plan.pxd), and up to 16 rows reads them
# as they lie (panels.pxd); a call below 12 microseconds has one thread (_cpu.pyx). B and H stand around these, and
# between.
BATCHES = st.sampled_from([1, 2, 3, 4, 4, 6, 7, 8, 8, 15, 16, 17, 32, 33, 48, 64, 70]) | st.integers(1, 70)
HIDDEN = st.sampled_from([64, 64, 128, 128, 1, 15, 16, 17, 31, 33, 47, 48, 50, 63, 65, 69]) | st.integers(0, 70)
INPUTS = st.sampled_from([0, 1, 16, 64, 70]) | st.integers(0, 70)
UNPROJECTED = st.sampled_from(["LSTM", "LSTM with all", "GRU", "GRU reset after", "RNN", "Dense"])
KINDS = st.sampled_from(["projected LSTM", "coupled LSTM"]) | UNPROJECTED
NAMES = st.sampled_from([*PARAMETERS, ("leaky_relu", 0.01), ("hard_sigmoid", 0.2, 0.5)])


@pytest.fixture(autouse=True)
def _calls_may_back_off():
    """As for users, and other than in other tests (tests/conftest.py)."""
    _team.adapt(True)
    yield
    _team.adapt(False)


# ------------------------------------------------------------------------------------------------------------- drawing
@st.composite
def cells(draw, inputs, hidden, dtype, kinds=KINDS, reverse=False):
    kind, g = draw(kinds), np.random.default_rng(draw(SEEDS))
    of_all = {"reverse": True} if reverse else {}
    if kind == "RNN" or (kind != "Dense" and draw(st.sampled_from([False, False, True]))):
        of_all["activation"] = draw(NAMES)
        if kind != "RNN":
            of_all["recurrent_activation"] = draw(NAMES)

    def weights(*shape):
        return uniform(g, shape, dtype, 1.5 / np.sqrt(max(shape[0], 1)))

    if kind == "Dense":
        return Dense(weights(inputs, hidden), weights(hidden), draw(st.sampled_from(ACTIVATIONS)))
    if kind == "RNN":
        return RNN(weights(inputs + hidden, hidden), weights(hidden), **of_all)
    if "GRU" in kind:
        matrices = [weights(inputs + hidden, gates * hidden) for gates in (2, 1)]
        options = {"reset_after": True, "b_hc": weights(hidden)} if kind == "GRU reset after" else {}
        return GRU(*matrices, weights(2 * hidden), weights(hidden), **options, **of_all)
    options = {"cell_clip": 0.4, "forget_bias": 0.3, "gate_order": "ifco"} if kind == "LSTM with all" else {}
    if kind in ("projected LSTM", "coupled LSTM") and hidden:  # a coupled one may be projected, too
        gates, outputs = 3 if kind == "coupled LSTM" else 4, draw(st.sampled_from([1, 16, 33, 70]))
        if gates == 3 and draw(st.booleans()):
            w, projection = weights(inputs + hidden, 3 * hidden), {}
        else:
            w, projection = weights(inputs + outputs, gates * hidden), {"w_p": weights(hidden, outputs)}
            projection["proj_clip"] = draw(st.sampled_from([0.0, 0.2]))
        peepholes = {name: weights(hidden) for name in ("wcf", "wco") if gates == 3}
        return LSTM(w, weights(gates * hidden), coupled=gates == 3, **projection, **peepholes, **of_all)
    peepholes = {name: weights(hidden) for name in ("wci", "wcf", "wco") if options}
    return LSTM(weights(inputs + hidden, 4 * hidden), weights(4 * hidden), **peepholes, **options, **of_all)


@st.composite
def stacks(draw, inputs, dtype, part):
    """One to three layers, of which one may be a stack itself."""
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        layers.append(draw(part(inputs, draw(HIDDEN), dtype)))
        inputs = layers[-1].output_size
    return Stack(layers)


def cells_or_stacks(inputs, hidden, dtype):
    return cells(inputs, hidden, dtype) | stacks(inputs, dtype, cells)


@st.composite
def headed(draw, layer):
    """Some of the layers below a dense one, which gives only the last step."""
    below = draw(layer)
    if draw(st.integers(0, 3)):
        return below
    head = draw(cells(below.output_size, draw(HIDDEN), below.dtype, st.just("Dense")))
    for last in draw(st.permutations([True, "ends"])):
        with contextlib.suppress(ValueError):  # as "ends" has no meaning above a dense layer
            return Stack([below, Dense(*head.weights.values(), head.activation, last=last)])


@st.composite
def streamed(draw):
    """A layer that has a stream."""
    inputs, dtype = draw(INPUTS), draw(st.sampled_from(DTYPES))
    return draw(headed(cells(inputs, draw(HIDDEN), dtype) | stacks(inputs, dtype, cells_or_stacks)))


@st.composite
def bidirectional(draw, inputs, hidden, dtype):
    fw = draw(cells(inputs, hidden, dtype))
    return Bidirectional(fw, draw(cells(inputs, fw.output_size, dtype, UNPROJECTED)))


def layers():
    """A layer of any kind."""
    return headed(whole_layers())


@st.composite
def whole_layers(draw):
    inputs, hidden, dtype = draw(INPUTS), draw(HIDDEN), draw(st.sampled_from(DTYPES))
    one = draw(st.sampled_from([cells, partial(cells, reverse=True), bidirectional]))
    if draw(st.booleans()):
        return draw(one(inputs, hidden, dtype))
    return draw(stacks(inputs, dtype, draw(st.sampled_from([one, cells_or_stacks, bidirectional]))))


def uniform(seed, shape, dtype, width=1.0):
    return np.random.default_rng(seed).uniform(-width, width, shape).astype(dtype)


def turned(x, options):
    """The same arguments batch first."""
    turned = {name: np.ascontiguousarray(options[name].T) for name in ("reset", "mask") if name in options}
    return np.ascontiguousarray(x.swapaxes(0, 1)), options | turned | {"batch_first": True}


def swapped(array, batch_first):
    """Time first for batch first, and the other way round; a y of last steps has no time."""
    return array.swapaxes(0, 1) if batch_first and array.ndim == 3 else array


def new_weights(layer, seed):
    """Others for some of the weights."""
    g = np.random.default_rng(seed)
    names = [name for name in layer.weights if g.random() < 0.7]
    return {name: uniform(g, layer.weights[name].shape, layer.dtype, 0.3) for name in names}


FORMS = {  # of the same numbers
    "as it is": lambda array: array,
    "list": lambda array: array.tolist(),
    "strided": strided,
    "backwards": backwards,
    "Fortran": np.asfortranarray,
    "read-only": read_only,
    "misaligned": misaligned,
    "byte-swapped": byte_swapped,
}
forms = st.sampled_from(["as it is", "as it is", *FORMS])
BAD_INPUTS = {
    "None": lambda x: None,
    "text": lambda x: "x",
    "objects": lambda x: np.full(x.shape, None),
    "a row more": lambda x: np.concatenate([x, x[..., :1, :]], axis=-2),
    "no rows": lambda x: x[..., :0, :],
    "a column more": lambda x: np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype),
    "rank": lambda x: x[None],
    "scalar": lambda x: x.dtype.type(1),
    "other dtype": lambda x: x.astype(np.float32 if x.dtype == np.float64 else np.float64),
    "integers": lambda x: np.zeros(x.shape, int),
    "ragged": lambda x: [[1.0], [2.0, 3.0]],
}
BAD_OUTPUTS = {
    "text": lambda y: "hello",
    "list": lambda y: y.tolist(),
    "a row more": lambda y: np.concatenate([y, y[..., :1, :]], axis=-2),
    "a column more": lambda y: np.zeros((*y.shape[:-1], y.shape[-1] + 1), y.dtype),
    "rank": lambda y: y[None],
    "read-only": read_only,
    "other dtype": lambda y: y.astype(np.float32 if y.dtype == np.float64 else np.float64),
    "byte-swapped": byte_swapped,
    "strided": strided,
    "misaligned": misaligned,
}


# ------------------------------------------------------------------------------------------------------------- streams
def quantized_to(scheme, layer):
    """The layer itself where there is no scheme."""
    return layer if scheme is None else layer.quantize(scheme)


class Model:
    """A stream in the plainest way: the layer called step by step on one thread, with the state of the call before."""

    def __init__(self, layer, batch, scheme=None):
        self.scheme = scheme
        self.refresh(layer)
        self.state = zeros(layer, batch)

    def refresh(self, layer):
        quantized, self.over_time = quantized_to(self.scheme, layer), layer._over_time
        self.layer = quantized.dequantize() if self.scheme == "float16" else copy.copy(quantized)

    def after(self, x, state):
        """y of some steps and the state after them."""
        y = np.empty((*x.shape[:2], self.layer.output_size), x.dtype)
        with on_threads(1), with_products_of("c"):
            for t in range(len(x)):
                y[t : t + 1], state = self.layer(x[t : t + 1], state)
        return y, state

    def rows_after(self, x, state, lengths=None, mask=None, reset=None):
        """The same of a layer of any kind, one row after the other, each without the steps that it leaves out."""
        T, B = x.shape[:2]
        y, lasts = np.zeros((*[T] * self.over_time, B, self.layer.output_size), x.dtype), []
        with on_threads(1), with_products_of("c"):
            for b in range(B):
                counted = np.arange(T) < (T if lengths is None else lengths[b])
                steps = np.flatnonzero(counted if mask is None else counted & mask[:, b])
                options = {}
                if reset is not None:  # also at one of the steps that are left out before this one
                    options["reset"] = np.diff(reset[:, b].cumsum()[steps], prepend=0)[:, None] > 0
                first = like(state, lambda a, b=b: a[b : b + 1])
                row = (steps, slice(b, b + 1)) if self.over_time else slice(b, b + 1)
                y[row], last = self.layer(x[steps, b : b + 1], first, **options)
                lasts.append(leaves(last))
        parts = zip(*lasts, strict=True)
        return y, like(state, lambda _: np.concatenate(next(parts)))

    def run(self, x):
        y, self.state = self.after(x, self.state)
        return y

    def run_rows(self, x, rows, lengths=None):
        """The same of some rows, each of them alone."""
        y = np.zeros((*x.shape[:2], self.layer.output_size), x.dtype)
        for k, row in enumerate(rows):
            end = len(x) if lengths is None else lengths[k]
            y[:end, k : k + 1], last = self.after(x[:end, k : k + 1], self.state_of([row]))
            self.set_state([row], last)
        return y

    def state_of(self, rows):
        return like(self.state, lambda array: array[rows])

    def set_state(self, rows, states):
        parts = iter(leaves(states))

        def with_them(array):
            array = array.copy()
            array[rows] = next(parts)
            return array

        self.state = like(self.state, with_them)

    def reset(self, rows):
        def without(array):
            array = array.copy()
            array[slice(None) if rows is None else np.array(rows, int if len(rows) == 0 else None)] = 0
            return array

        self.state = like(self.state, without)


@contextlib.contextmanager
def with_products_of(way):
    """Products in integers with these instructions, for what is done here."""
    before = _integer.in_use()
    _integer.use(way)
    try:
        yield
    finally:
        _integer.use(before)


class Process(RuleBasedStateMachine):
    """Threads, grids and the instructions for products in integers change between calls, at one CPU level.

    Where other work takes the CPUs, calls back off; those of models, which set the number of threads, end that.
    """

    def start(self, threads, way, level, caches):
        self.undo = contextlib.ExitStack()
        self.undo.enter_context(with_machine(caches=caches))
        self.undo.enter_context(with_products_of(way))
        patch = self.undo.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_kernels, "ENGINES", _kernels.load(level))
        blockcell.set_num_threads(threads)

    def teardown(self):
        blockcell.set_num_threads(None)
        use_grid(*GRIDS[0])
        self.undo.close()

    @rule()
    def back_off(self):
        back_off()

    @rule(threads=st.sampled_from(THREADS), grid=st.sampled_from(GRIDS))
    def set_num_threads(self, threads, grid=GRIDS[0]):
        blockcell.set_num_threads(threads)
        use_grid(*grid)

    @rule(way=WAYS)
    def use_other_instructions(self, way):
        _integer.use(way)


class Streams(Process):
    """A stream and its model side by side."""

    @initialize(data=st.data(), batch=BATCHES, scheme=st.sampled_from([None, *SCHEMES]), process=PROCESSES)
    def begin(self, data, batch, scheme, process):
        self.start(**process)
        layer = data.draw(streamed())
        self.layer, self.batch = layer, batch
        self.scheme = scheme if layer.dtype == np.float32 else None
        self.source = quantized_to(self.scheme, layer)
        self.stream, self.model = self.source.stream(batch), Model(layer, batch, self.scheme)

    @invariant()
    def the_state_is_that_of_the_model(self):
        assert same(self.stream.state, self.model.state)

    def inputs(self, seed, steps, rows=None):
        return uniform(seed, (steps, self.batch if rows is None else rows, self.layer.input_size), self.layer.dtype)

    def results(self, *steps, rows=None):
        rows = self.batch if rows is None else rows
        return np.full((*steps, rows, self.layer.output_size), 7, self.layer.dtype)

    # ------------------------------------------------------------------------------------------------------- good calls
    @rule(seed=SEEDS, form=forms, with_out=st.booleans())
    def step(self, seed, form, with_out):
        x, out = self.inputs(seed, 1), self.results() if with_out else None
        y = self.stream.step(FORMS[form](x[0]), out=out)
        assert out is None or y is out
        assert same(y, self.model.run(x)[0])

    @rule(seed=SEEDS, steps=st.sampled_from([0, 1, 2, 5, 6, 6, 12]), form=forms, with_out=st.booleans())
    def run(self, seed, steps, form, with_out):
        x, out = self.inputs(seed, steps), self.results(steps) if with_out else None
        if steps == 0 and form == "list":
            form = "as it is"  # an empty list has no shape
        y = self.stream.run(FORMS[form](x), out=out)
        assert out is None or y is out
        assert same(y, self.model.run(x))

    @rule(seed=SEEDS, steps=st.sampled_from([1, 2, 5, 12]), form=forms, with_out=st.booleans())
    def run_lengths(self, seed, steps, form, with_out):
        x, out = self.inputs(seed, steps), self.results(steps) if with_out else None
        lengths = np.random.default_rng(seed).integers(0, steps + 1, self.batch)
        y = self.stream.run(FORMS[form](x), out, lengths=lengths)
        assert out is None or y is out
        assert same(y, self.model.run_rows(x, range(self.batch), lengths))

    # ------------------------------------------------------------------------------------------------------- some rows
    def some_rows(self, seed, how):
        """Their numbers, and the same as they are given."""
        g = np.random.default_rng(seed)
        rows = g.permutation(self.batch)[: g.integers(0, min(self.batch, 9) + 1)]
        if how == "mask":
            rows = np.sort(rows)
            return rows, np.isin(np.arange(self.batch), rows)
        return rows, {
            "array": rows,
            "list": rows.tolist(),
            "negative": rows - self.batch,
            "mixed": np.where(rows % 2, rows, rows - self.batch),
            "strided": strided(rows),
            "bytes": rows.astype(np.uint8),
            "swapped": rows.astype(">i2"),
        }[how]

    ways = st.sampled_from(["array", "array", "list", "negative", "mixed", "mask", "strided", "bytes", "swapped"])

    @rule(seed=SEEDS, how=ways, form=forms, with_out=st.booleans())
    def step_rows(self, seed, how, form, with_out):
        rows, as_given = self.some_rows(seed, how)
        x = self.inputs(seed, 1, len(rows))
        out = self.results(rows=len(rows)) if with_out else None
        if form == "list" and len(rows) == 0:
            form = "as it is"  # an empty list has no shape
        y = self.stream.step(FORMS[form](x[0]), out, rows=as_given)
        assert out is None or y is out
        assert same(y, self.model.run_rows(x, rows)[0])

    @rule(seed=SEEDS, how=ways, form=forms, steps=st.sampled_from([0, 1, 2, 5, 6, 12]), with_lengths=st.booleans())
    def run_some_rows(self, seed, how, form, steps, with_lengths):
        rows, as_given = self.some_rows(seed, how)
        x = self.inputs(seed, steps, len(rows))
        lengths = np.random.default_rng(seed).integers(0, steps + 1, len(rows)) if with_lengths else None
        if form == "list" and x.size == 0:
            form = "as it is"
        y = self.stream.run(FORMS[form](x), rows=as_given, lengths=lengths)
        assert same(y, self.model.run_rows(x, rows, lengths))

    @rule(seed=SEEDS, how=ways, batch=st.integers(9, 20))
    def move_rows(self, seed, how, batch):
        """To another stream, of another batch, and back, to other rows."""
        rows, as_given = self.some_rows(seed, how)
        back, back_as_given = self.some_rows(seed + 1, how)
        n, g = min(len(rows), len(back)), np.random.default_rng(seed)
        if how == "mask":
            as_given, back_as_given = rows, back
        there, places = self.source.stream(batch), g.permutation(batch)[:n]
        states = self.stream.state_of(as_given[:n])
        assert same(states, self.model.state_of(rows[:n]))
        there.set_state(places, states)
        for array in leaves(states):
            array[...] = 9  # it was a copy, and so is what the other one has
        self.stream.set_state(back_as_given[:n], there.state_of(places))
        self.model.set_state(back[:n], self.model.state_of(rows[:n]))

    @rule(data=st.data(), how=st.sampled_from(["all", "none", "one", "some", "negative", "mask", "array"]))
    def reset(self, data, how):
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), max_size=9))
        rows = {
            "all": None,
            "none": [],
            "one": rows[:1],
            "some": rows,
            "negative": [row - self.batch for row in rows],
            "mask": [row in rows for row in range(self.batch)],
            "array": np.array(rows, np.int32),
        }[how]
        self.stream.reset(rows)
        self.model.reset(rows)

    @rule()
    def read_state(self):
        """It is a copy: the stream does not see what is done to it."""
        for array in leaves(self.stream.state):
            array[...] = 9

    @rule(seed=SEEDS, form=forms, as_list=st.booleans())
    def write_state(self, seed, form, as_list):
        g = np.random.default_rng(seed)
        state = like(self.model.state, lambda a: uniform(g, a.shape, a.dtype))
        new_state = like(like(state, np.copy), FORMS[form])
        self.stream.state = list(new_state) if as_list else new_state
        for array in leaves(new_state) if form == "as it is" else ():
            array[...] = 9  # a copy, too
        self.model.state = state

    @rule(
        how=st.sampled_from(["copy", "deepcopy", "pickle"]),
        seed=SEEDS,
        steps=st.integers(0, 3),
        caches=st.sampled_from(CACHES),
    )
    def go_on_with_a_copy(self, how, seed, steps, caches):
        """The other one has the same results and is on its own; a pickle may be read on another machine."""
        old, x = self.stream, self.inputs(seed, steps)
        self.stream = {
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda stream: pickle.loads(pickle.dumps(stream)),
        }[how](old)
        y, state = self.model.after(x, self.model.state)
        assert same(old.run(x), y) and same(old.state, state)
        old.reset()
        assert type(self.stream) is type(old) and self.stream.batch == self.batch
        self.source = self.stream.layer
        if self.scheme is None:
            self.layer = self.source
        if how == "pickle":
            _cpu.use_machine(caches=caches)

    # -------------------------------------------------------------------------------------------------------- weights
    @precondition(lambda self: self.scheme is None)
    @rule(seed=SEEDS)
    def set_weights(self, seed):
        """The stream has them from `refresh` on."""
        self.layer.set_weights(**new_weights(self.layer, seed))

    @rule()
    def refresh(self):
        """Of a quantized layer, which nothing changes, it does nothing."""
        self.stream.refresh()
        self.model.refresh(self.layer)

    # -------------------------------------------------------------------------------------------------------- bad calls
    def refuse(self, call):
        with pytest.raises(REFUSED) as caught:
            call()
        note(repr(caught.value))

    @rule(bad=st.sampled_from(sorted(BAD_INPUTS)), seed=SEEDS, steps=st.integers(-1, 3))
    def bad_input(self, bad, seed, steps):
        """steps < 0: of `step`. Also a run of no steps looks at what it is given."""
        x = self.inputs(seed, max(steps, 1))[:steps] if steps >= 0 else self.inputs(seed, 1)[0]
        self.refuse(lambda: (self.stream.run if steps >= 0 else self.stream.step)(BAD_INPUTS[bad](x)))

    @rule(bad=st.sampled_from(sorted(BAD_OUTPUTS)), seed=SEEDS, steps=st.integers(-1, 3))
    def bad_output(self, bad, seed, steps):
        """Of a stack, no layer has advanced."""
        x, out = self.inputs(seed, abs(steps)), self.results(*[steps] * (steps >= 0))
        x, out = x if steps >= 0 else x[0], BAD_OUTPUTS[bad](out)
        if isinstance(out, np.ndarray) and out.size == 0 and bad in ("strided", "misaligned"):
            return  # nothing can be wrong with it
        if bad == "strided" and out.flags.c_contiguous:
            return
        self.refuse(lambda: (self.stream.run if steps >= 0 else self.stream.step)(x, out=out))

    @precondition(lambda self: self.layer.input_size and self.layer.output_size)
    @rule(seed=SEEDS, steps=st.integers(-1, 3).filter(bool))
    def overlapping_output(self, seed, steps):
        x = self.inputs(seed, abs(steps)).ravel()
        memory = np.zeros(x.size + abs(steps) * self.batch * self.layer.output_size - 1, x.dtype)
        memory[: x.size] = x
        shape = (steps, self.batch) if steps >= 0 else (self.batch,)
        x, out = memory[: x.size].reshape(*shape, -1), memory[x.size - 1 :].reshape(*shape, -1)
        if isinstance(self.layer, Stack):  # which may have read x before it writes
            y, state = self.model.after(x.copy().reshape(abs(steps), self.batch, -1), self.model.state)
            try:
                results = (self.stream.run if steps >= 0 else self.stream.step)(x, out=out)
            except REFUSED:
                return
            assert same(results, y.reshape(results.shape))
            self.model.state = state
        else:
            self.refuse(lambda: (self.stream.run if steps >= 0 else self.stream.step)(x, out=out))

    @rule(bad=st.sampled_from(["beyond", "before", "mask", "text", "fraction", "mixed"]))
    def bad_reset(self, bad):
        rows = {
            "beyond": [self.batch],
            "before": [-self.batch - 1],
            "mask": [True] * (self.batch + 1),
            "text": "a",
            "fraction": [0.5],
            "mixed": [0, self.batch],
        }[bad]
        self.refuse(lambda: self.stream.reset(rows))

    @rule(
        bad=st.sampled_from(
            ["beyond", "before", "twice", "mask", "text", "fraction", "rank", "x", "lengths", "states"]
        ),
        seed=SEEDS,
        form=st.sampled_from([list, np.array]),
    )
    def bad_rows(self, bad, seed, form):
        rows, n = {
            "beyond": ([0, self.batch], 2),
            "before": ([-self.batch - 1], 1),
            "twice": ([0, -self.batch], 2),
            "mask": ([True] * (self.batch + 1), self.batch + 1),
            "text": ("a", 1),
            "fraction": ([0.5], 1),
            "rank": ([[0]], 1),
        }.get(bad, ([0], 1))
        rows = form(rows)
        x = self.inputs(seed, 3, n + (bad == "x"))
        states = like(self.model.state, lambda a: np.zeros((n + 2 * (bad == "states"), *a.shape[1:]), a.dtype))
        if bad == "states":
            if leaves(states):
                self.refuse(lambda: self.stream.set_state(rows, states))
            return
        self.refuse(lambda: self.stream.run(x, rows=rows, lengths=[4] if bad == "lengths" else None))
        if bad == "lengths":
            return
        self.refuse(lambda: self.stream.step(x[0], rows=rows))
        if bad != "x":
            self.refuse(lambda: self.stream.state_of(rows))
            self.refuse(lambda: self.stream.set_state(rows, states))

    @rule(bad=st.sampled_from(["number", "parts", "rows", "dtype", "text"]), seed=SEEDS, data=st.data())
    def bad_state(self, bad, seed, data):
        """All parts are good but one."""
        g = np.random.default_rng(seed)
        state = like(self.model.state, lambda a: uniform(g, a.shape, a.dtype))
        if bad not in ("number", "parts") and not leaves(state):
            return  # of a dense layer
        wrong, k = data.draw(st.integers(0, max(0, len(leaves(state)) - 1))), iter(range(99))
        spoil = {
            "rows": lambda a: np.concatenate([a, a[:1]]),
            "dtype": lambda a: a.astype(np.float32 if a.dtype == np.float64 else np.float64),
            "text": lambda a: "state",
        }
        if bad == "number":
            state = 3
        elif bad == "parts":
            state = (*state, state[:1]) if seed % 2 or not state else state[1:]
        else:
            state = like(state, lambda a: spoil[bad](a) if next(k) == wrong else a)
        self.refuse(lambda: setattr(self.stream, "state", state))

    # ----------------------------------------------------------------------------- the stream in its own arguments
    @rule(
        event=st.sampled_from(["refresh", "reset", "write", "step", "run", "threads"]), seed=SEEDS, steps=st.booleans()
    )
    def meddle(self, event, seed, steps):
        """The conversion of x uses the stream, before the call has begun: what it does there is done."""
        x = self.inputs(seed, 3)[: 3 if steps else 1]
        meddling = {
            "refresh": lambda: (self.scheme or self.set_weights(seed=seed), self.refresh()),
            "reset": lambda: (self.stream.reset([0]), self.model.reset([0])),
            "write": lambda: self.write_state(seed=seed, form="strided", as_list=False),
            "step": lambda: self.step(seed=seed + 1, form="as it is", with_out=True),
            "run": lambda: self.run(seed=seed + 1, steps=12, form="as it is", with_out=False),
            "threads": lambda: self.set_num_threads(threads=seed % 4 + 1),
        }[event]

        class Meddler:
            def __array__(self, dtype=None, copy=None):
                meddling()
                return x if steps else x[0]

        y = (self.stream.run if steps else self.stream.step)(Meddler())
        expected, self.model.state = self.model.after(x, self.model.state)
        assert same(y.reshape(expected.shape), expected)


# -------------------------------------------------------------------------------------------------------------- layers
class Layers(Process):
    """A layer and a copy of it that uses one thread; tapes stay good whatever happens in between.

    The copy's arrays are byte-swapped, so that it has to read and convert them, where the layer takes them as they are.
    Beside a quantized layer its rows are computed one after the other.
    """

    @initialize(data=st.data(), scheme=st.sampled_from([None, None, *SCHEMES[1:]]), process=PROCESSES)
    def begin(self, data, scheme, process):
        self.start(**process)
        layer, self.tapes = data.draw(layers()), []
        self.scheme = scheme if layer.dtype == np.float32 else None
        self.layer = quantized_to(self.scheme, layer)
        self.model = Model(layer, 1, self.scheme) if self.scheme else copy.copy(layer)

    is_not_quantized = precondition(lambda self: self.scheme is None)

    @is_not_quantized
    @invariant()
    def the_weights_are_those_of_the_model(self):
        assert same(self.layer.weights, self.model.weights)

    def draw(self, seed, T, B, state, lengths, reset, mask=None):
        g, dtype = np.random.default_rng(seed), self.layer.dtype
        options = {}
        if state:
            options["state"] = like(zeros(self.layer, B), lambda a: uniform(g, a.shape, dtype))
        if lengths:
            options["lengths"] = g.integers(0, T + 1, B)
        if reset:
            options["reset"] = g.random((T, B)) < 0.3
        if mask:
            options |= {"mask": g.random((T, B)) < 0.7, "masked": mask}
        return uniform(g, (T, B, self.layer.input_size), dtype), options

    steps = st.sampled_from([0, 1, 2, 3, 6, 9])
    masks = st.sampled_from([None, None, "zero", "repeat"])
    arguments: ClassVar = {"seed": SEEDS, "T": steps, "B": BATCHES, "mask": masks}
    arguments |= dict.fromkeys(["state", "lengths", "reset", "batch_first"], st.booleans())

    @rule(form=forms, **arguments)
    def call(self, seed, T, B, form, state, lengths, reset, mask, batch_first):
        x, options = self.draw(seed, T, B, state, lengths, reset, mask)
        if self.scheme:
            options.pop("masked", None)
        if form == "list" and 0 in (T, B):
            form = "as it is"  # an empty list has no shape
        args = turned(x, options) if batch_first else (x, options)
        if form == "backwards" and state:
            args[1]["state"] = like(options["state"], FORMS[form])
        y, last = self.layer(FORMS[form](args[0]), **args[1])
        if self.scheme:
            expected = self.model.rows_after(x, options.pop("state", zeros(self.layer, B)), **options)
        else:
            with on_threads(1):
                expected = self.model(byte_swapped(x), **options)
        assert same((swapped(y, batch_first), last), expected)

    @is_not_quantized
    @rule(**arguments)
    def forward(self, seed, T, B, state, lengths, reset, mask, batch_first):
        """The model is time first."""
        x, options = self.draw(seed, T, B, state, lengths, reset, mask)
        args = turned(x, options) if batch_first else (x, options)
        y, last, tape = self.layer.forward(args[0], **args[1])
        with on_threads(1):
            expected_y, expected_last, expected_tape = self.model.forward(byte_swapped(x), **options)
        assert same((swapped(y, batch_first), last), (expected_y, expected_last))
        self.tapes = [*self.tapes[-2:], (self.layer, tape, self.model, expected_tape, expected_y.shape, last)]
        for array in (args[0], *(args[1][name] for name in ("reset", "mask") if name in args[1])):
            array[...] = 9  # a tape has copies

    @precondition(lambda self: self.tapes)
    @rule(seed=SEEDS, which=st.integers(0, 2), with_y=st.booleans(), with_state=st.booleans())
    def backward(self, seed, which, with_y, with_state):
        layer, tape, model, expected_tape, shape, last = self.tapes[which % len(self.tapes)]
        g = np.random.default_rng(seed)
        d_y = uniform(g, shape, layer.dtype) if with_y else None
        d_state = like(last, lambda a: uniform(g, a.shape, a.dtype)) if with_state else None
        incoming = swapped(d_y, tape.batch_first) if with_y else None
        d_x, *gradients = layer.backward(tape, incoming, d_state)
        with on_threads(1):
            expected = model.backward(expected_tape, byte_swapped(d_y) if with_y else None, d_state)
        assert same((swapped(d_x, tape.batch_first), *gradients), expected)

    @is_not_quantized
    @rule(seed=SEEDS)
    def set_weights(self, seed):
        weights = new_weights(self.layer, seed)
        self.layer.set_weights(**weights)
        self.model.set_weights(**weights)
        for array in weights.values():
            array[...] = 9

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]))
    def go_on_with_a_copy(self, how):
        """The old one's weights are its own."""
        old, self.layer = self.layer, how(self.layer)
        if self.scheme is None:
            self.model = copy.copy(self.model)
            old.set_weights(**{name: np.zeros_like(array) for name, array in old.weights.items()})

    @rule(bad=st.sampled_from(sorted(BAD_INPUTS)), seed=SEEDS, training=st.booleans())
    def bad_call(self, bad, seed, training):
        """A batch may have any number of rows, but that of the state, if there is one; any dtype is wrong but one."""
        x, _ = self.draw(seed, 3, 4, False, False, False)
        state = zeros(self.layer, 4)
        if bad in ("a row more", "no rows") and not leaves(state):
            return  # of dense layers
        with pytest.raises(REFUSED):
            (self.layer.forward if training and not self.scheme else self.layer)(BAD_INPUTS[bad](x), state)

    @is_not_quantized
    @rule(seed=SEEDS, data=st.data())
    def bad_weights(self, seed, data):
        """All are good but one: none is taken."""
        weights = dict(self.layer.weights)
        name = data.draw(st.sampled_from(sorted(weights)))
        wrong = {key: uniform(seed, array.shape, array.dtype) for key, array in weights.items()}
        wrong[name] = np.concatenate([wrong[name], np.zeros((1, *wrong[name].shape[1:]), wrong[name].dtype)])
        with pytest.raises(ValueError):
            self.layer.set_weights(**wrong)


# ------------------------------------------------------------------------------------------------------------ sessions
class Hooked:
    """A stream in the middle of whose runs something is done."""

    def __init__(self, stream, hook):
        self.stream, self.hook = stream, hook

    def run(self, *arguments, **options):
        self.hook()
        return self.stream.run(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class ManySessions(Process):
    """Sessions of one layer at two places, each of them beside the layer that is called for it alone."""

    places = st.integers(0, 1)
    limits = st.sampled_from([None, None, 1, 1, 2, 5, 40])

    @initialize(
        data=st.data(),
        capacity=st.sampled_from([1, 2, 5]),
        scheme=st.sampled_from([None, *SCHEMES]),
        process=PROCESSES,
    )
    def begin(self, data, capacity, scheme, process):
        self.start(**process)
        layer = data.draw(streamed())
        scheme = scheme if layer.dtype == np.float32 else None
        self.layer, self.model = layer, Model(layer, 1, scheme)
        source = quantized_to(scheme, layer)
        self.there = [blockcell.Sessions(source, capacity=capacity) for _ in range(2)]
        self.known = [{}, {}]  # by id: the state, and what waits
        self.ended = [[], []]

    @invariant()
    def as_many_as_are_open(self):
        assert [len(sessions) for sessions in self.there] == [len(known) for known in self.known]

    def one(self, place, number):
        """One of the sessions that are open at a place; None if there is none."""
        known = self.known[place]
        return sorted(known)[number % len(known)] if known else None

    def input(self, seed, steps):
        """Of so many steps; below zero for a single one without an axis for it."""
        return uniform(seed, (*[steps] * (steps >= 0), self.layer.input_size), self.layer.dtype)

    # ---------------------------------------------------------------------------------------------------- coming, going
    @rule(place=places)
    def open(self, place):
        id = self.there[place].open()
        assert id not in self.known[place] and id not in self.ended[place]
        self.known[place][id] = [zeros(self.model.layer, 1), []]

    @rule(place=places, number=st.integers(0, 99))
    def close(self, place, number):
        if (id := self.one(place, number)) is not None:
            self.there[place].close(id)
            del self.known[place][id]
            self.ended[place].append(id)

    @rule(place=places, number=st.integers(0, 99))
    def move(self, place, number):
        """To the other place; what waits stays behind."""
        if (id := self.one(place, number)) is not None:
            state = pickle.loads(pickle.dumps(self.there[place].save(id)))
            assert same(state, self.known[place][id][0])
            new = self.there[1 - place].restore(state)
            for array in leaves(state):
                array[...] = 9
            assert new not in self.known[1 - place] and new not in self.ended[1 - place]
            self.known[1 - place][new] = [self.known[place][id][0], []]

    @rule(place=places, how=st.sampled_from([copy.copy, copy.deepcopy, lambda old: pickle.loads(pickle.dumps(old))]))
    def go_on_with_a_copy(self, place, how):
        """The old one has no part in it."""
        old, self.there[place] = self.there[place], how(self.there[place])
        for id in self.known[place]:
            old.feed(id, self.input(id, 2))
        old.step()

    # ----------------------------------------------------------------------------------------------------- input, steps
    @rule(
        place=places, number=st.integers(0, 99), seed=SEEDS, form=forms, steps=st.sampled_from([-1, -1, -1, 0, 1, 3, 9])
    )
    def feed(self, place, number, seed, form, steps):
        if (id := self.one(place, number)) is not None:
            x = self.input(seed, steps)
            if form == "list" and x.size == 0:
                form = "as it is"
            x_fed = FORMS[form](x.copy())
            self.there[place].feed(id, x_fed)
            if form == "as it is":
                x_fed[...] = 9  # it was copied
            self.known[place][id][1].append(x)

    @rule(place=places, seed=SEEDS, steps=st.sampled_from([-1, -1, 1, 4]))
    def feed_all(self, place, seed, steps):
        for number in range(len(self.known[place])):
            self.feed(place=place, number=number, seed=seed + number, form="as it is", steps=steps)

    def expected(self, place, limit):
        """What the next step gives, and does to the model."""
        results = {}
        for id, session in self.known[place].items():
            state, waiting = session
            fed_steps, rest, room = [], [], np.inf if limit is None else limit
            for x in waiting:
                steps = 1 if x.ndim == 1 else len(x)
                if steps > room:
                    fed_steps, rest = [*fed_steps, *([x[:room]] if room else [])], [*rest, x[room:] if room else x]
                elif steps:
                    fed_steps.append(x)
                room -= min(room, steps)
            if fed_steps:
                session[1] = rest
                y, session[0] = self.model.after(np.concatenate([*map(np.atleast_2d, fed_steps)])[:, None], state)
                results[id] = y[0, 0] if len(fed_steps) == 1 and fed_steps[0].ndim == 1 else y[:, 0]
        return results

    def check(self, results, expected):
        assert results.keys() == expected.keys()
        for id, y in results.items():
            assert same(y, expected[id]) and y.base is None

    @rule(place=places, limit=limits)
    def step(self, place, limit):
        self.check(self.there[place].step(limit), self.expected(place, limit))

    @rule(place=places, limit=limits, number=st.integers(0, 99), seed=SEEDS)
    def step_while_others_come_and_go(self, place, limit, number, seed):
        """In the middle of a step, and a second step is refused."""
        sessions, expected, done = self.there[place], self.expected(place, limit), []

        def hook():
            if not done:
                done.append(True)
                self.refuse_step(sessions)
                if (id := self.one(place, number)) is not None:
                    self.close(place=place, number=number)
                    expected.pop(id, None)
                self.open(place=place)
                self.feed_all(place=place, seed=seed, steps=-1)

        stream = sessions._stream
        sessions._stream = Hooked(stream, hook)
        try:
            results = sessions.step(limit)
        finally:
            sessions._stream = stream
        self.check(results, expected)

    @staticmethod
    def refuse_step(sessions):
        with pytest.raises(RuntimeError, match="another step is running"):
            sessions.step()

    @rule(place=places, limit=limits, after=st.integers(0, 2))
    def step_that_fails(self, place, limit, after):
        """After some of the groups: nothing is lost, and nothing computed twice."""
        sessions, expected, runs = self.there[place], self.expected(place, limit), []

        def hook():
            runs.append(True)
            if len(runs) > after:
                raise MemoryError

        stream = sessions._stream
        sessions._stream = Hooked(stream, hook)
        results = {}
        try:
            results = sessions.step(limit)
        except MemoryError:
            assert len(runs) == after + 1
        finally:
            sessions._stream = stream
        if not results:
            results = sessions.step(limit)
        self.check(results, expected)

    @rule(
        place=places, seed=SEEDS, bad=st.sampled_from(["rank", "column", "dtype", "text", "closed", "limit", "state"])
    )
    def bad_call(self, place, seed, bad):
        sessions, x = self.there[place], self.input(seed, 3)
        if bad == "closed":
            for id in (*self.ended[place][-1:], 10**6, -1, "0"):
                for call in (sessions.close, sessions.save, lambda id=id: sessions.feed(id, x)):
                    with pytest.raises(ValueError):
                        call(id)
            return
        other = np.float32 if x.dtype == np.float64 else np.float64
        wrong_inputs = {
            "rank": x[None],
            "column": np.zeros((3, x.shape[1] + 1), x.dtype),
            "dtype": x.astype(other),
            "text": "a",
        }
        with pytest.raises(REFUSED):
            if bad == "limit":
                sessions.step([0, -1, 1.5, "a"][seed % 4])
            elif bad == "state":
                sessions.restore(3)
            elif (id := self.one(place, seed)) is not None:
                sessions.feed(id, wrong_inputs[bad])
            else:
                raise ValueError("nobody is there")


# ------------------------------------------------------------------------------------------------------------- scorers
class Scorers(Process):
    """A scorer beside calls of its layer with one sequence at a time, on one thread."""

    outputs = st.sampled_from(["last", "all", "mean", np.flip])
    threads = st.sampled_from([None, *THREADS])
    numbers = st.sampled_from([0, 1, 2, 7, 20]) | st.integers(0, 70)

    @initialize(
        data=st.data(),
        scheme=st.sampled_from([None, None, None, *SCHEMES]),
        output=outputs,
        batch=st.integers(1, 9),
        process=PROCESSES,
    )
    def begin(self, data, scheme, output, batch, process):
        self.start(**process)
        self.folder = Path(self.undo.enter_context(tempfile.TemporaryDirectory()))
        layer = data.draw(layers())
        self.layer, self.scheme = layer, scheme if layer.dtype == np.float32 else None
        self.iterators = []
        self.new_scorer(output=output, batch=batch, threads=1, source="layer")

    @rule(output=outputs, batch=st.integers(1, 9), threads=threads, source=st.sampled_from(["layer", "path"]))
    def new_scorer(self, output, batch, threads, source):
        """With the weights that the layer has now."""
        if not self.layer._over_time and output in ("all", "mean"):
            output = "last"
        made_of = quantized_to(self.scheme, self.layer)
        if source == "path":
            path = self.folder / f"{len([*self.folder.iterdir()])}.npz"
            made_of.save(path)
            made_of = path
        self.scorer = blockcell.Scorer(made_of, output=output, batch=batch, num_threads=threads)
        self.model, self.output = Model(self.layer, 1, self.scheme), output

    def sequences(self, seed, number, longest):
        g = np.random.default_rng(seed)
        lengths = g.integers(1 if self.layer._over_time else 0, longest + 1, number)
        return [uniform(g, (length, self.layer.input_size), self.layer.dtype) for length in lengths]

    def expected(self, xs):
        with on_threads(1), with_products_of("c"):
            return [alone(self.layer, self.output, x, self.model.layer) for x in xs]

    longest = st.sampled_from([1, 2, 5, 12, 40])

    @rule(seed=SEEDS, number=numbers, longest=longest, form=forms, kind=st.sampled_from([list, tuple, iter, "objects"]))
    def score(self, seed, number, longest, form, kind):
        xs = self.sequences(seed, number, longest)
        sequences = [FORMS[form](x) for x in xs]
        if kind == "objects":
            sequences, lists = np.empty(number, object), sequences
            sequences[:] = lists
        else:
            sequences = kind(sequences)
        results = self.scorer(sequences)
        assert isinstance(results, list) == (kind is not iter)
        assert same([*results], self.expected(xs))

    @rule(seed=SEEDS, number=numbers, longest=longest)
    def begin_to_score(self, seed, number, longest):
        """An iterator, of which other calls go on while it does. It uses its array again, and is from now on told."""
        xs, buffer = self.sequences(seed, number, longest), np.empty((longest, self.layer.input_size), self.layer.dtype)

        def filled():
            for x in xs:
                buffer[: len(x)] = x
                yield buffer[: len(x)]
            buffer[...] = 9

        self.iterators = [*self.iterators[-2:], (self.scorer(filled()), iter(self.expected(xs)))]

    @precondition(lambda self: self.iterators)
    @rule(which=st.integers(0, 2), count=st.sampled_from([1, 5, 40, 99]))
    def go_on(self, which, count):
        iterator, expected = self.iterators[which % len(self.iterators)]
        assert same([*itertools.islice(iterator, count)], [*itertools.islice(expected, count)])

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy, lambda scorer: pickle.loads(pickle.dumps(scorer))]))
    def go_on_with_a_copy(self, how):
        self.scorer = how(self.scorer)

    @rule(seed=SEEDS)
    def set_weights(self, seed):
        """The scorer keeps those that it has."""
        self.layer.set_weights(**new_weights(self.layer, seed))

    @rule(seed=SEEDS, longest=longest, event=st.sampled_from(["score", "weights", "threads"]))
    def meddle(self, seed, longest, event):
        """The conversion of a sequence uses the scorer, its layer or the threads."""
        x, *others = self.sequences(seed, 4, longest)

        class Meddler:
            def __array__(meddler, dtype=None, copy=None):
                if event == "score":
                    self.score(seed=seed + 1, number=5, longest=5, form="as it is", kind=list)
                elif event == "weights":
                    self.set_weights(seed=seed)
                else:
                    self.set_num_threads(threads=seed % 4 + 1)
                return x

        assert same(self.scorer([*others, Meddler()]), self.expected([*others, x]))

    BAD = ("None", "text", "objects", "a column more", "rank", "scalar", "other dtype", "integers", "ragged")

    @rule(seed=SEEDS, bad=st.sampled_from([*BAD, "no steps"]), number=st.integers(0, 9), as_list=st.booleans())
    def bad_sequence(self, seed, bad, number, as_list):
        """Good ones are as good as before."""
        xs = self.sequences(seed, number + 1, 5)
        if bad == "objects" and xs[number].size == 0:
            return  # nothing can be wrong with it
        if bad == "no steps" and not self.layer._over_time:
            return  # such a layer has a y of them
        sequences = [*xs[:number], xs[number][:0] if bad == "no steps" else BAD_INPUTS[bad](xs[number])]
        with pytest.raises(REFUSED, match=rf"Scorer: sequences\[{number}\]"):
            [*self.scorer(sequences if as_list else iter(sequences))]
        assert same(self.scorer(xs), self.expected(xs))


# ------------------------------------------------------------------------------------------------------------- running
MACHINES = {
    "streams": Streams,
    "layers": Layers,
    "sessions": ManySessions,
    "scorers": Scorers,
}
FEW = {
    "streams": (100, 30),
    "layers": (160, 15),
    "sessions": (60, 25),
    "scorers": (60, 15),
}  # examples, and calls in each
MANY = {
    "streams": (5000, 60),
    "layers": (11_000, 40),
    "sessions": (3000, 60),
    "scorers": (3000, 30),
}


def explore(name, examples, calls, seed):
    profile = settings(
        max_examples=examples,
        stateful_step_count=calls,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(seeded(seed)(MACHINES[name]), settings=profile)


@pytest.mark.parametrize("name", MACHINES)
def test_any_sequence_of_calls(name, seed):
    explore(name, *FEW[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_many_sequences_of_calls(name, seed):
    explore(name, *MANY[name], seed)
