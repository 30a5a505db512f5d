"""Calls of every kind, and the results that each must have.

A scenario makes an object, does one thing with it, observes it, and goes on with it. `Expected` has the results of all
that when nothing goes wrong, and checks those of a call that was disturbed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bits import bits, like
from cases import FUNCTIONS, arguments, as_passed
from layer_cases import can_stream, halved_weights

import blockcell
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Quantized, Scorer, Sessions, Stack
from blockcell._kernels import bind
from blockcell.optable import OPS

T, B, I, H = 6, 16, 32, 64  # noqa: E741
# Two threads share these rows.
SIZES = {"T": T, "B": B, "I": I, "H": H}


def ignore(subject: Any = None) -> None:
    """Do nothing with an object."""


def identity(y: np.ndarray) -> np.ndarray:
    """Return the argument."""
    return y


@dataclass
class Scenario:
    """One thing that is done with an object."""

    make: Callable[[], Any]
    act: Callable[[Any], Any]
    observe: Callable[[Any], Any] = ignore
    """What can be seen of the object, which observing does not change."""
    go_on: Callable[[Any], Any] = ignore
    """What the object does next."""
    crashes_numpy: bool = False
    """Whether numpy itself crashes if an allocation fails: in random numbers, and to hash a dtype from a pickle."""


Scenarios = dict[str, Scenario]


def uniform(*shape: int, dtype: Any = np.float32, seed: int = 0, width: float = 1.0) -> np.ndarray:
    """Draw numbers between -width and width."""
    return np.random.default_rng([seed, *shape]).uniform(-width, width, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------------------------ ops
def op_scenarios() -> Scenarios:
    """Call every op: with arrays, with a list, and with arrays for the results."""

    def scenarios_of(name: str) -> Scenarios:
        function, args, x = FUNCTIONS[name], arguments(name, SIZES), OPS[name].inputs[0].name
        args_with_list = args | {x: args[x].tolist()}
        return {
            name: Scenario(lambda: args, lambda args: function(**args), bits),
            f"{name} out": Scenario(lambda: function(**args), lambda out: function(**args, out=out)),
            f"{name} list": Scenario(lambda: args_with_list, lambda args: function(**args), bits),
        }

    return {name: scenario for op in OPS for name, scenario in scenarios_of(op).items()}


def first_call_scenarios() -> Scenarios:
    """Call every op for the first time after it was bound, which makes the frame that later calls use again."""

    def scenario_of(name: str, dtype: str) -> Scenario:
        args = as_passed(name, arguments(name, SIZES, dtype=dtype))
        return Scenario(lambda: bind(OPS[name]).run, lambda run: run(*args), go_on=lambda run: run(*args))

    return {f"{name} {dtype}": scenario_of(name, dtype) for name in OPS for dtype in ("float32", "float16")}


# --------------------------------------------------------------------------------------------------------------- layers
def make_layers() -> dict[str, Any]:
    """Make a layer of every kind, of which "bidirectional" alone has no streams."""
    return {
        "LSTM": LSTM.init(I, H, seed=0, use_peephole=True, cell_clip=0.5),
        "LSTM half": LSTM.init(I, H, seed=0, dtype=np.float16),
        "projected LSTM": LSTM.init(I, H, seed=0, use_peephole=True, proj_size=72, proj_clip=0.1, coupled=True),
        "GRU": GRU.init(I, H, seed=1),
        "RNN": RNN.init(I, H, seed=1, activation="softsign"),
        "GRU that resets after": GRU.init(I, H, seed=1, reset_after=True),
        "stack": Stack([LSTM.init(I, H, seed=2), Stack([GRU.init(H, 40, seed=3), LSTM.init(40, H, seed=4)])]),
        "bidirectional": Stack(
            [Bidirectional(GRU.init(I, H, seed=5), LSTM.init(I, H, seed=6)), LSTM.init(2 * H, H, seed=7)]
        ),
        "dense": Dense.init(I, H, seed=10, activation="softmax"),
        "classifier": Stack([GRU.init(I, H, seed=11), Dense.init(H, 5, seed=12, activation="tanh")]),
    }


def layer_scenarios() -> Scenarios:
    """Call, train, copy, pickle and make layers, and replace their weights."""
    last = {"last": Stack([LSTM.init(I, H, seed=13), Dense.init(H, 5, seed=14, last=True)])}
    scenarios = {}
    for name, layer in (make_layers() | last).items():
        scenarios |= {f"{name}: {what}": scenario for what, scenario in scenarios_of_layer(layer).items()}
    for kind in (LSTM, GRU, Dense):
        init = partial(kind.init, 5, 7, seed=0)
        scenarios[f"{kind.__name__}: init"] = Scenario(ignore, lambda _, init=init: init().weights, crashes_numpy=True)  # type: ignore[misc]
    return scenarios


def scenarios_of_layer(layer: Any) -> Scenarios:
    x = uniform(T, B, I, dtype=layer.dtype)
    d_y = uniform(*layer(x)[0].shape, dtype=layer.dtype)
    state = like(layer(x)[1], np.copy)
    lists = x.tolist(), like(state, np.ndarray.tolist)
    rows = {"lengths": np.arange(B) % (T + 1), "reset": np.arange(T * B).reshape(T, B) % 5 == 0}
    masked = {"mask": np.arange(T * B).reshape(T, B) % 3 > 0, "masked": "repeat"}
    tape, tape_of_rows = layer.forward(x, state)[2], layer.forward(x, **rows)[2]

    def train(layer: Any, **options: Any) -> Any:
        y, last, tape = layer.forward(x, **options)
        return y, last, layer.backward(tape, d_y)

    def observe(layer: Any) -> Any:
        return layer.weights, layer(x)

    acts: dict[str, Callable[[Any], Any]] = {
        "call": lambda layer: layer(x),
        "call state": lambda layer: layer(x, state),
        "call lengths": lambda layer: layer(x, lengths=rows["lengths"]),
        "call rows": lambda layer: layer(x, **rows),
        "call list": lambda layer: layer(*lists),
        "call strided": lambda layer: layer(x[::-1]),
        "call batch first": lambda layer: layer(x, batch_first=True),
        "forward": lambda layer: layer.forward(x)[:2],
        "forward rows": lambda layer: layer.forward(x, state, **rows)[:2],
        "both": train,
        "both lengths": partial(train, lengths=rows["lengths"], state=state),
        "both rows": partial(train, **rows),
        "both mask": partial(train, **masked),
        "backward": lambda _: tape.layer.backward(tape, d_y, state),
        "backward rows": lambda _: tape_of_rows.layer.backward(tape_of_rows, d_y[::-1]),
        "copy": lambda layer: copy.copy(layer).weights,
    }
    if can_stream(layer):  # and so takes states at resets
        starts = {"reset": rows["reset"], "reset_state": like(state, lambda a: np.broadcast_to(a, (T, *a.shape)))}
        acts["call reset state"] = lambda layer: layer(x, **starts)
        acts["both reset state"] = partial(train, lengths=rows["lengths"], **starts)
    scenarios = {what: Scenario(lambda: layer, act, observe, train) for what, act in acts.items()}
    set_weights = partial(lambda new, layer: layer.set_weights(**new), halved_weights(layer))
    scenarios["set_weights"] = Scenario(partial(copy.copy, layer), set_weights, observe, train)
    pickled = lambda layer: pickle.loads(pickle.dumps(layer)).weights  # noqa: E731
    return scenarios | {"pickle": Scenario(lambda: layer, pickled, observe, train, crashes_numpy=True)}


# -------------------------------------------------------------------------------------------------------------- streams
def stream_scenarios() -> Scenarios:
    """Use streams of layers, quantized or not, and layers that are quantized."""
    layers = make_layers()
    scenarios: Scenarios = {}
    for name, layer in layers.items():
        if can_stream(layer):
            scenarios |= scenarios_of_stream(name, layer)
    # These are so large that a single step uses threads.
    for name, layer in {"wide LSTM": LSTM.init(64, 256, seed=8), "wide GRU": GRU.init(64, 256, seed=9)}.items():
        of_layer = scenarios_of_stream(name, layer)
        scenarios |= {
            f"{name}: {what}": of_layer[f"{name}: {what}"] for what in ("step", "step out", "run", "run rows")
        }
    for name, scheme in (("classifier", "int8"), ("LSTM", "float16"), ("bidirectional", "int8")):
        if can_stream(layers[name]):
            scenarios |= scenarios_of_stream(f"{name} in {scheme}", layers[name], scheme)
        scenarios |= scenarios_of_quantized(f"{name} in {scheme}", layers[name], scheme)
    return scenarios


def scenarios_of_stream(name: str, layer: Any, scheme: str | None = None) -> Scenarios:
    x = uniform(2 * T, B, layer.input_size, dtype=layer.dtype)
    states = like(layer(x)[1], np.copy)
    x_list, states_list, states_of_3 = x.tolist(), like(states, np.ndarray.tolist), like(states, lambda a: a[:3].copy())

    def make_of(layer: Any) -> Any:
        stream = (layer.quantize(scheme) if scheme else layer).stream(B)
        stream.run(x[:2])
        return stream

    def make() -> Any:
        return make_of(layer)

    def make_with_new_weights() -> Any:
        stream = make_of(copy.copy(layer))
        if not isinstance(stream.layer, Quantized):
            stream.layer.set_weights(**halved_weights(layer))
        return stream

    def go_on(stream: Any) -> Any:
        return stream.step(x[0]), stream.run(x), stream.state, stream.step(x[1]), stream.state

    def observe(stream: Any) -> Any:
        return stream.state, go_on(copy.copy(stream))

    def out(*steps: int, rows: int = B) -> np.ndarray:
        return np.empty((*steps, rows, layer.output_size), layer.dtype)

    acts: dict[str, Callable[[Any], Any]] = {
        "step": lambda stream: stream.step(x[0]),
        "step out": lambda stream: stream.step(x[0], out=out()),
        "step list": lambda stream: stream.step(x_list[0]),
        "step strided": lambda stream: stream.step(x[0, ::-1]),
        "run": lambda stream: stream.run(x[:2]),
        "run longer": lambda stream: stream.run(x),
        "run out": lambda stream: stream.run(x[:T], out=out(T)),
        "run list": lambda stream: stream.run(x_list),
        "step rows": lambda stream: stream.step(x[0, :3], rows=[7, 0, -1]),
        "step rows out": lambda stream: stream.step(x[0, :5], out(rows=5), rows=np.arange(5) * 3),
        "run rows": lambda stream: stream.run(x[:, 2:4].copy(), rows=np.arange(B) % 8 == 5, lengths=[T, 1]),
        "run lengths": lambda stream: stream.run(x[:T], lengths=np.arange(B) % T),
        "state of rows": lambda stream: stream.state_of([3, -1]),
        "set state of rows": lambda stream: stream.set_state([9, 8, 0], states_of_3),
        "state": lambda stream: stream.state,
        "set state": lambda stream: setattr(stream, "state", states),
        "set state list": lambda stream: setattr(stream, "state", states_list),
        "reset": lambda stream: stream.reset(),
        "reset rows": lambda stream: stream.reset([1, -1]),
        "reset mask": lambda stream: stream.reset([k % 2 == 0 for k in range(B)]),
        "copy": lambda stream: copy.copy(stream).state,
        "new": lambda stream: stream.layer.stream(B).state,
    }
    scenarios = {f"{name}: {what}": Scenario(make, act, observe, go_on) for what, act in acts.items()}
    pickled = lambda stream: pickle.loads(pickle.dumps(stream)).state  # noqa: E731
    scenarios[f"{name}: pickle"] = Scenario(make, pickled, observe, go_on, crashes_numpy=True)
    refresh = Scenario(make_with_new_weights, lambda stream: stream.refresh(), observe, go_on)
    return scenarios | {f"{name}: refresh": refresh}


def scenarios_of_quantized(name: str, layer: Any, scheme: str) -> Scenarios:
    x = uniform(2 * T if can_stream(layer) else T, B, I, dtype=layer.dtype)
    quantized, mask = layer.quantize(scheme), np.arange(len(x) * B).reshape(-1, B) % 3 > 0
    acts: dict[str, Callable[[Any], Any]] = {
        "quantize": lambda layer: layer.quantize(scheme)(x),
        "quantized call": lambda _: quantized(x),
        "quantized lengths": lambda _: quantized(x, lengths=[T] * B),
        "quantized mask": lambda _: quantized(x, mask=mask, reset=~mask),
        "quantized pickle": lambda _: pickle.loads(pickle.dumps(quantized))(x),
    }
    if can_stream(layer):
        acts["quantized stream"] = lambda _: quantized.stream(B).run(x)
    return {f"{name}: {what}": Scenario(lambda: layer, act) for what, act in acts.items()}


# ------------------------------------------------------------------------------------------------------------- scorers
def scorer_scenarios() -> Scenarios:
    """Use scorers of layers."""
    layers = make_layers()
    return (
        scenarios_of_scorer("bidirectional", layers["bidirectional"], "last")
        | scenarios_of_scorer("classifier in int8", layers["classifier"].quantize("int8"), "all")
        | scenarios_of_scorer("function", layers["projected LSTM"], identity)
    )


def scenarios_of_scorer(name: str, source: Any, output: Any) -> Scenarios:
    xs = [uniform(t, I) for t in (5, 1, 9, 5, 2)]

    def make() -> Scorer:
        blockcell.scorer._read_file.cache_clear()  # each reads its file anew
        return Scorer(source, output=output, batch=2, num_threads=None)

    def score(scorer: Scorer) -> list[Any]:
        return scorer(xs)

    acts: dict[str, Callable[[Scorer], Any]] = {
        "list": score,
        "lists": lambda scorer: scorer([x.tolist() for x in xs]),
        "iterator": lambda scorer: [*scorer(iter(xs))],
        "some": lambda scorer: next(scorer(x for x in xs)),
        "new": lambda scorer: make()(xs),
        "pickle": lambda scorer: pickle.loads(pickle.dumps(scorer))(xs),
    }
    return {
        f"scorer of {name}: {what}": Scenario(make, act, score, score, crashes_numpy=what == "pickle")
        for what, act in acts.items()
    }


# ------------------------------------------------------------------------------------------------------------- sessions
def make_sessions(layer: Any) -> Sessions:
    """Make five sessions that wait for steps, more than there is capacity for, to be run in two groups.

    One of them has had a step, and one was closed.
    """
    sessions, x = Sessions(layer, capacity=2), uniform(T, I, dtype=layer.dtype)
    for _ in range(5):
        sessions.open()
    sessions.feed(0, x[:2])
    sessions.feed(3, x[0])
    sessions.step()
    sessions.close(3)
    sessions.feed(0, x[2])
    sessions.feed(1, x)
    sessions.feed(2, x[0])
    sessions.feed(2, x[1:4])
    return sessions


def outcome(sessions: Sessions, *returned: dict[int, np.ndarray]) -> Any:
    """Return y by session, with what a copy goes on to return; the sessions' states; and how many there are."""
    sessions, results, states = copy.copy(sessions), [*returned], {}
    while step := sessions.step():
        results.append(step)
    for id in range(9):
        with contextlib.suppress(ValueError):
            states[id] = sessions.save(id)
    ys = {id: [np.atleast_2d(step[id]) for step in results if id in step] for id in {*itertools.chain(*results)}}
    return {id: np.concatenate(parts) for id, parts in sorted(ys.items())}, states, len(sessions)


def session_scenarios() -> Scenarios:
    """Use sessions, in ways that can be repeated."""
    layers = make_layers()
    return (
        scenarios_of_sessions("stack", layers["stack"])
        | scenarios_of_sessions("LSTM half", layers["LSTM half"], copies=True)  # ten thousand allocations of others
        | scenarios_of_sessions("classifier", layers["classifier"].quantize("int8"))
    )


def scenarios_of_sessions(name: str, layer: Any, copies: bool = False) -> Scenarios:
    x = uniform(T, I, dtype=layer.dtype)

    def close(sessions: Sessions) -> None:
        with contextlib.suppress(ValueError):
            sessions.close(1)

    def go_on(sessions: Sessions) -> Any:
        for id in (0, 2, sessions.open()):
            sessions.feed(id, x[:2])
        return [*outcome(sessions)[0].values()]

    acts: dict[str, Callable[[Sessions], Any]] = {
        "open": lambda sessions: sessions.open(),
        "feed": lambda sessions: sessions.feed(4, x[0]),
        "feed list": lambda sessions: sessions.feed(2, x[:3].tolist()),
        "close": close,
        "step": lambda sessions: sessions.step(),
        "step limit": lambda sessions: sessions.step(2),
        "save": lambda sessions: sessions.save(0),
        "save new": lambda sessions: sessions.save(4),
        "restore": lambda sessions: sessions.restore(sessions.save(0)),
        "new": lambda sessions: Sessions(layer).open(),
    }
    if copies:
        acts["copy"] = lambda sessions: copy.copy(sessions).step(1)
        acts["pickle"] = lambda sessions: pickle.loads(pickle.dumps(sessions)).step(1)
    make = partial(make_sessions, layer)
    return {
        f"sessions of {name}: {what}": Scenario(make, act, outcome, go_on, crashes_numpy=what == "pickle")
        for what, act in acts.items()
    }


def step_scenarios() -> Scenarios:
    """Make steps of sessions whose results have somewhere to go: nothing is lost or computed twice.

    Not for Ctrl-C, which may strike when a step has returned, and before anybody has its results.
    """

    def scenario_of(layer: Any, *limit: int) -> Scenario:
        def act(subject: Any) -> None:
            sessions, returned = subject
            returned[0] = sessions.step(*limit)

        return Scenario(lambda: (make_sessions(layer), [{}]), act, lambda subject: outcome(subject[0], *subject[1]))

    scenarios = {}
    for name, layer in make_layers().items():
        if can_stream(layer):
            scenarios[f"sessions of {name}: step"] = scenario_of(layer)
            scenarios[f"sessions of {name}: step limit"] = scenario_of(layer, 2)
    return scenarios


# ----------------------------------------------------------------------------------------------------- files and models
def file_scenarios() -> Scenarios:
    """Save and load layers, quantized or not, and score with one from a file."""
    folder = Path(tempfile.mkdtemp(prefix="blockcell-faults-"))
    old, layer = GRU.init(3, 4, seed=0), make_layers()["bidirectional"]
    quantized, old_quantized = layer.quantize("int8"), old.quantize("int8")

    def save(layer: Any, path: Path) -> Path:
        layer.save(path)
        return path

    def load(path: Path) -> Any:
        return blockcell.load(path).weights

    def load_quantized(path: Path) -> Any:
        return Quantized.load(path).dequantize().weights

    scenarios = {}
    for suffix in (".npz", ".safetensors"):
        path, quantized_path, other_path = (folder / f"{name}{suffix}" for name in ("a", "small", "other"))
        scenarios |= {
            f"load {suffix}": Scenario(partial(save, layer, path), load, load),
            f"save {suffix}": Scenario(partial(save, old, path), layer.save, load, load),
            f"load int8 {suffix}": Scenario(partial(save, quantized, quantized_path), load_quantized, load_quantized),
            f"save in int8 {suffix}": Scenario(
                partial(save, old_quantized, other_path), quantized.save, load_quantized, load_quantized
            ),
        }
    make_layers()["stack"].save(folder / "stack.npz")
    return scenarios | scenarios_of_scorer("path", folder / "stack.npz", "mean")


def export_scenarios() -> Scenarios:
    """Write ONNX models."""
    import onnx_export

    path = Path(tempfile.mkdtemp(prefix="blockcell-faults-")) / "a.onnx"
    layers = make_layers()

    def content(model: Any) -> bytes:
        return model.SerializeToString(deterministic=True)  # type: ignore[no-any-return]

    def write_old_file() -> Path:
        path.write_bytes(b"old")
        return path

    def export(layer: Any, _: Any) -> bytes:
        return content(onnx_export.export(layer, None))

    def build(name: str, _: Any) -> bytes:
        return content(onnx_export.build(name))

    scenarios = {
        f"export {name}": Scenario(ignore, partial(export, layers[name])) for name in ("LSTM", "bidirectional")
    }
    scenarios["export to a file"] = Scenario(
        write_old_file,
        lambda path: content(onnx_export.export(layers["LSTM"], path, streaming=True)),
        lambda path: path.read_bytes() if path.read_bytes() == b"old" else len(path.read_bytes()),
    )
    return scenarios | {
        f"build {name}": Scenario(ignore, partial(build, name)) for name in ("BlockLSTM", "block_gru_grad")
    }


GROUPS = {
    "ops": op_scenarios,
    "first calls": first_call_scenarios,
    "layers": layer_scenarios,
    "streams": stream_scenarios,
    "scorers": scorer_scenarios,
    "sessions": session_scenarios,
    "steps": step_scenarios,
    "files": file_scenarios,
    "export": export_scenarios,
}
COMPUTING = ("ops", "layers", "streams", "scorers", "sessions")


class Expected:
    """A scenario's results when nothing goes wrong."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        subject = scenario.make()
        self.old_state = bits(scenario.observe(subject))
        self.results_after_old = bits(scenario.go_on(subject))
        subject = scenario.make()
        self.result = bits(scenario.act(subject))
        self.new_state = bits(scenario.observe(subject))
        self.results_after_new = bits(scenario.go_on(subject))

    def check(self, subject: Any, failed: bool, result: Any) -> None:
        """Check that a call that failed has changed the object wholly or not at all, and that the object goes on so."""
        if not failed:
            assert bits(result) == self.result, "there is no error, but the result is wrong"
        state = bits(self.scenario.observe(subject))
        assert state == self.new_state or (failed and state == self.old_state), "what is left is neither old nor new"
        results = self.results_after_new if state == self.new_state else self.results_after_old
        assert bits(self.scenario.go_on(subject)) == results, "the result of what it does next is wrong"

    def check_undisturbed(self, subject: Any = None) -> None:
        """Act the scenario out with an object, or with a new one, and check the results."""
        subject = self.scenario.make() if subject is None else subject
        self.check(subject, False, self.scenario.act(subject))


def expected_results(groups: Any = COMPUTING) -> Iterator[tuple[str, Expected]]:
    """Yield the name and the results of every scenario of these groups."""
    for group in groups:
        for name, scenario in GROUPS[group]().items():
            yield name, Expected(scenario)
