"""Calls of every kind, and the results that each must have.

A scenario makes an object, does one thing with it, looks at it, and goes on with it. `Expected` has the results of all
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

import blockcell
from blockcell import GRU, LSTM, RNN, Bidirectional, Dense, Quantized, Scorer, Sessions, Stack
from blockcell._bind import bind
from blockcell.optable import OPS

T, B, I, H = 6, 16, 32, 64  # noqa: E741
# Two threads share these rows.


def nothing(thing: Any = None) -> None:
    return None


@dataclass
class Scenario:
    make: Callable[[], Any]
    act: Callable[[Any], Any]
    seen: Callable[[Any], Any] = nothing
    """What can be seen of the object, which looking does not change."""
    follow: Callable[[Any], Any] = nothing
    """What the object does next."""


def uniform(*shape: int, dtype: Any = np.float32, seed: int = 0, width: float = 1.0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(-width, width, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------------------ scenarios
def of_ops() -> dict[str, Scenario]:
    found = {}
    for name, op in OPS.items():
        args = arguments(name, {"T": T, "B": B, "I": I, "H": H})
        call = FUNCTIONS[name]
        converted = args | {op.inputs[0].name: args[op.inputs[0].name].tolist()}

        def into(out: Any, call: Any = call, args: Any = args) -> Any:
            return call(**args, out=out)

        found[name] = Scenario(lambda args=args: args, lambda args, call=call: call(**args), bits)  # type: ignore[misc]
        found[f"{name} out"] = Scenario(lambda call=call, args=args: call(**args), into)  # type: ignore[misc]
        found[f"{name} list"] = Scenario(  # type: ignore[misc]
            lambda args=converted: args, lambda args, call=call: call(**args), bits
        )
    return found


def of_first_calls() -> dict[str, Scenario]:
    """The first call of an op after it was bound, which makes the frame that later calls use again."""
    found = {}
    for name in OPS:
        for dtype in ("float32", "float16"):
            args = as_passed(name, arguments(name, {"T": T, "B": B, "I": I, "H": H}, dtype=dtype))

            def call(run: Any, args: Any = args) -> Any:
                return run(*args)

            found[f"{name} {dtype}"] = Scenario(lambda name=name: bind(OPS[name]).run, call, follow=call)  # type: ignore[misc]
    return found


def kinds() -> dict[str, Any]:
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


def halved(layer: Any) -> dict[str, np.ndarray]:
    return {name: array * array.dtype.type(0.5) for name, array in layer.weights.items()}


def of_layers() -> dict[str, Scenario]:
    found = {}
    last = {"last": Stack([LSTM.init(I, H, seed=13), Dense.init(H, 5, seed=14, last=True)])}
    for name, layer in (kinds() | last).items():
        x = uniform(T, B, I, dtype=layer.dtype)
        d_y = uniform(*layer(x)[0].shape, dtype=layer.dtype)
        state = like(layer(x)[1], np.copy)
        lists = x.tolist(), like(state, np.ndarray.tolist)
        rows = {"lengths": np.arange(B) % (T + 1), "reset": np.arange(T * B).reshape(T, B) % 5 == 0}
        masked = {"mask": np.arange(T * B).reshape(T, B) % 3 > 0, "masked": "repeat"}
        new = halved(layer)
        tapes = layer.forward(x, state)[2], layer.forward(x, **rows)[2]

        def trained(layer: Any, x: Any = x, d_y: Any = d_y, **options: Any) -> Any:
            y, last, tape = layer.forward(x, **options)
            return y, last, layer.backward(tape, d_y)

        acts = {
            "call": lambda layer, x=x: layer(x),
            "call state": lambda layer, x=x, state=state: layer(x, state),
            "call lengths": lambda layer, x=x, lengths=rows["lengths"]: layer(x, lengths=lengths),
            "call rows": lambda layer, x=x, rows=rows: layer(x, **rows),
            "call list": lambda layer, lists=lists: layer(*lists),
            "call strided": lambda layer, x=x: layer(x[::-1]),
            "call batch first": lambda layer, x=x: layer(x, batch_first=True),
            "forward": lambda layer, x=x: layer.forward(x)[:2],
            "forward rows": lambda layer, x=x, state=state, rows=rows: layer.forward(x, state, **rows)[:2],
            "both": trained,
            "both lengths": partial(trained, lengths=rows["lengths"], state=state),
            "both rows": partial(trained, **rows),
            "both mask": partial(trained, **masked),
            "backward": lambda layer, tape=tapes[0], d_y=d_y, state=state: tape.layer.backward(tape, d_y, state),
            "backward rows": lambda layer, tape=tapes[1], d_y=d_y: tape.layer.backward(tape, d_y[::-1]),
            "set_weights": lambda layer, new=new: layer.set_weights(**new),
            "copy": lambda layer: copy.copy(layer).weights,
            "pickle": lambda layer: pickle.loads(pickle.dumps(layer)).weights,
        }
        for what, act in acts.items():
            make = partial(copy.copy, layer) if what == "set_weights" else lambda layer=layer: layer
            found[f"{name}: {what}"] = Scenario(make, act, lambda layer, x=x: (layer.weights, layer(x)), trained)
    for kind in (LSTM, GRU, Dense):
        found[f"{kind.__name__}: init"] = Scenario(nothing, lambda _, kind=kind: kind.init(5, 7, seed=0).weights)  # type: ignore[misc]
    return found


def of_streams() -> dict[str, Scenario]:
    found = {}
    streamed = {name: layer for name, layer in kinds().items() if name != "bidirectional"}
    # These are so large that a single step uses threads.
    wide = {"wide LSTM": LSTM.init(64, 256, seed=8), "wide GRU": GRU.init(64, 256, seed=9)}
    small = {"classifier in int8": kinds()["classifier"], "LSTM in float16": kinds()["LSTM"]}
    for name, layer in (streamed | wide | small).items():
        scheme = name.partition(" in ")[2]
        x = uniform(2 * T, B, layer.input_size, dtype=layer.dtype)
        states = like(layer(x)[1], np.copy)
        lists, states_list, some = x.tolist(), like(states, np.ndarray.tolist), like(states, lambda a: a[:3].copy())
        new = layer.weights if name in wide else halved(layer)

        def make(layer: Any = layer, x: Any = x, scheme: Any = scheme) -> Any:
            stream = (layer.quantize(scheme) if scheme else layer).stream(B)
            stream.run(x[:2])
            return stream

        def with_new_weights(layer: Any = layer, make: Any = make, new: Any = new) -> Any:
            stream = make(copy.copy(layer))
            if not isinstance(stream.layer, Quantized):
                stream.layer.set_weights(**new)
            return stream

        def go_on(stream: Any, x: Any = x) -> Any:
            return stream.step(x[0]), stream.run(x), stream.state, stream.step(x[1]), stream.state

        def seen(stream: Any, go_on: Any = go_on) -> Any:
            return stream.state, go_on(copy.copy(stream))

        def out(*steps: int, layer: Any = layer, rows: int = B) -> np.ndarray:
            return np.empty((*steps, rows, layer.output_size), layer.dtype)

        acts = {
            "step": lambda stream, x=x: stream.step(x[0]),
            "step out": lambda stream, x=x, out=out: stream.step(x[0], out=out()),
            "step list": lambda stream, x=lists: stream.step(x[0]),
            "step strided": lambda stream, x=x: stream.step(x[0, ::-1]),
            "run": lambda stream, x=x: stream.run(x[:2]),
            "run longer": lambda stream, x=x: stream.run(x),
            "run out": lambda stream, x=x, out=out: stream.run(x[:T], out=out(T)),
            "run list": lambda stream, x=lists: stream.run(x),
            "step rows": lambda stream, x=x: stream.step(x[0, :3], rows=[7, 0, -1]),
            "step rows out": lambda stream, x=x, out=out: stream.step(x[0, :5], out(rows=5), rows=np.arange(5) * 3),
            "run rows": lambda stream, x=x: stream.run(x[:, 2:4].copy(), rows=np.arange(B) % 8 == 5, lengths=[T, 1]),
            "run lengths": lambda stream, x=x: stream.run(x[:T], lengths=np.arange(B) % T),
            "state of rows": lambda stream: stream.state_of([3, -1]),
            "set state of rows": lambda stream, some=some: stream.set_state([9, 8, 0], some),
            "state": lambda stream: stream.state,
            "set state": lambda stream, states=states: setattr(stream, "state", states),
            "set state list": lambda stream, states=states_list: setattr(stream, "state", states),
            "reset": lambda stream: stream.reset(),
            "reset rows": lambda stream: stream.reset([1, -1]),
            "reset mask": lambda stream: stream.reset([k % 2 == 0 for k in range(B)]),
            "refresh": lambda stream: stream.refresh(),
            "copy": lambda stream: copy.copy(stream).state,
            "pickle": lambda stream: pickle.loads(pickle.dumps(stream)).state,
            "new": lambda stream: stream.layer.stream(B).state,
        }
        for what, act in acts.items():
            if name not in wide or what in ("step", "step out", "run", "run rows"):
                begin = with_new_weights if what == "refresh" else make
                found[f"{name}: {what}"] = Scenario(begin, act, seen, go_on)
        if scheme:
            found |= of_quantized(name, layer, x, scheme)
    both = kinds()["bidirectional"]
    return found | of_quantized("bidirectional in int8", both, uniform(T, B, I), "int8")


def of_quantized(name: str, layer: Any, x: np.ndarray, scheme: str) -> dict[str, Scenario]:
    quantized, mask = layer.quantize(scheme), np.arange(len(x) * B).reshape(-1, B) % 3 > 0
    acts = {
        "quantize": lambda layer: layer.quantize(scheme)(x),
        "quantized call": lambda _: quantized(x),
        "quantized lengths": lambda _: quantized(x, lengths=[T] * B),
        "quantized mask": lambda _: quantized(x, mask=mask, reset=~mask),
        "quantized pickle": lambda _: pickle.loads(pickle.dumps(quantized))(x),
    }
    if "bidirectional" not in name:
        acts["quantized stream"] = lambda _: quantized.stream(B).run(x)
    return {f"{name}: {what}": Scenario(lambda: layer, act) for what, act in acts.items()}


def of_scorers() -> dict[str, Scenario]:
    layers = kinds()
    return (
        of_scorer("bidirectional", layers["bidirectional"], "last")
        | of_scorer("classifier in int8", layers["classifier"].quantize("int8"), "all")
        | of_scorer("function", layers["projected LSTM"], nothing_else)
    )


def of_scorer(name: str, source: Any, output: Any) -> dict[str, Scenario]:
    xs = [uniform(t, I) for t in (5, 1, 9, 5, 2)]

    def make() -> Scorer:
        blockcell.scorer._read_file.cache_clear()  # each reads its file anew
        return Scorer(source, output=output, batch=2, num_threads=None)

    def score(scorer: Scorer) -> list[Any]:
        return scorer(xs)

    acts = {
        "list": score,
        "lists": lambda scorer: scorer([x.tolist() for x in xs]),
        "iterator": lambda scorer: [*scorer(iter(xs))],
        "some": lambda scorer: next(scorer(x for x in xs)),
        "new": lambda scorer: make()(xs),
        "pickle": lambda scorer: pickle.loads(pickle.dumps(scorer))(xs),
    }
    return {f"scorer of {name}: {what}": Scenario(make, act, score, score) for what, act in acts.items()}


def nothing_else(y: np.ndarray) -> np.ndarray:
    return y


def some_sessions(layer: Any, *scheme: str) -> Sessions:
    """One has had a step and one was closed; what waits is run in two groups, for more sessions than there is room."""
    sessions, x = Sessions(layer.quantize(*scheme) if scheme else layer, capacity=2), uniform(T, I, dtype=layer.dtype)
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
    """What was returned, with what a copy goes on to return, for each session; and then its state."""
    sessions, results, states = copy.copy(sessions), [*returned], {}
    while step := sessions.step():
        results.append(step)
    for id in range(9):
        with contextlib.suppress(ValueError):
            states[id] = sessions.save(id)
    ys = {id: [np.atleast_2d(step[id]) for step in results if id in step] for id in {*itertools.chain(*results)}}
    return {id: np.concatenate(parts) for id, parts in sorted(ys.items())}, states, len(sessions)


def of_sessions() -> dict[str, Scenario]:
    """The acts can be repeated."""
    found = {}
    layers = {name: kinds()[name] for name in ("stack", "LSTM half", "classifier")}
    for name, layer in layers.items():
        scheme = ("int8",) if name == "classifier" else ()
        x = uniform(T, I, dtype=layer.dtype)

        def close(sessions: Sessions) -> None:
            with contextlib.suppress(ValueError):
                sessions.close(1)

        def go_on(sessions: Sessions, x: Any = x) -> Any:
            for id in (0, 2, sessions.open()):
                sessions.feed(id, x[:2])
            return [*outcome(sessions)[0].values()]

        acts = {
            "open": lambda sessions: sessions.open(),
            "feed": lambda sessions, x=x: sessions.feed(4, x[0]),
            "feed list": lambda sessions, x=x: sessions.feed(2, x[:3].tolist()),
            "close": close,
            "step": lambda sessions: sessions.step(),
            "step limit": lambda sessions: sessions.step(2),
            "save": lambda sessions: sessions.save(0),
            "save new": lambda sessions: sessions.save(4),
            "restore": lambda sessions: sessions.restore(sessions.save(0)),
            "new": lambda sessions, layer=layer: Sessions(layer).open(),
        }
        if name == "LSTM half":  # of others it takes ten thousand allocations
            acts["copy"] = lambda sessions: copy.copy(sessions).step(1)
            acts["pickle"] = lambda sessions: pickle.loads(pickle.dumps(sessions)).step(1)
        make = partial(some_sessions, layer, *scheme)
        found |= {f"sessions of {name}: {what}": Scenario(make, act, outcome, go_on) for what, act in acts.items()}
    return found


def of_steps() -> dict[str, Scenario]:
    """Steps of sessions whose results have somewhere to go: nothing is lost or computed twice.

    Not for Ctrl-C, which may strike when a step has returned, and before anybody has its results.
    """
    found = {}
    for name, layer in kinds().items():
        if name != "bidirectional":
            for what, options in {"step": (), "step limit": (2,)}.items():

                def act(thing: Any, options: Any = options) -> None:
                    sessions, returned = thing
                    returned[0] = sessions.step(*options)

                found[f"sessions of {name}: {what}"] = Scenario(
                    lambda layer=layer: (some_sessions(layer), [{}]),  # type: ignore[misc]
                    act,
                    lambda thing: outcome(thing[0], *thing[1]),
                )
    return found


def of_files() -> dict[str, Scenario]:
    found = {}
    folder = Path(tempfile.mkdtemp(prefix="blockcell-faults-"))
    old, layer = GRU.init(3, 4, seed=0), kinds()["bidirectional"]
    for suffix in (".npz", ".safetensors"):
        path = folder / f"a{suffix}"

        def make(layer: Any, path: Path = path) -> Path:
            layer.save(path)
            return path

        def read(path: Path) -> Any:
            return blockcell.load(path).weights

        found[f"load {suffix}"] = Scenario(partial(make, layer), read, read)
        found[f"save {suffix}"] = Scenario(partial(make, old), layer.save, read, read)
        small, other = folder / f"small{suffix}", folder / f"other{suffix}"
        quantized, load = layer.quantize("int8"), lambda path: Quantized.load(path).dequantize().weights
        quantized.save(small)
        found[f"load int8 {suffix}"] = Scenario(lambda path=small: path, load, load)  # type: ignore[misc]
        before = partial(make, old.quantize("int8"), other)
        found[f"save in int8 {suffix}"] = Scenario(before, quantized.save, load, load)
    kinds()["stack"].save(folder / "stack.npz")
    return found | of_scorer("path", folder / "stack.npz", "mean")


def of_export() -> dict[str, Scenario]:
    import onnx_export

    folder = Path(tempfile.mkdtemp(prefix="blockcell-faults-"))
    layers = {name: layer for name, layer in kinds().items() if name in ("LSTM", "bidirectional")}

    def content(model: Any) -> bytes:
        return model.SerializeToString(deterministic=True)  # type: ignore[no-any-return]

    def old() -> Path:
        path = folder / "a.onnx"
        path.write_bytes(b"old")
        return path

    found = {
        f"export {name}": Scenario(nothing, lambda _, layer=layer: content(onnx_export.export(layer, None)))  # type: ignore[misc]
        for name, layer in layers.items()
    }
    found["export to a file"] = Scenario(
        old,
        lambda path: content(onnx_export.export(layers["LSTM"], path, streaming=True)),
        lambda path: path.read_bytes() if path.read_bytes() == b"old" else len(path.read_bytes()),
    )
    for name in ("BlockLSTM", "block_gru_grad"):
        found[f"build {name}"] = Scenario(nothing, lambda _, name=name: content(onnx_export.build(name)))  # type: ignore[misc]
    return found


GROUPS = {
    "ops": of_ops,
    "first calls": of_first_calls,
    "layers": of_layers,
    "streams": of_streams,
    "scorers": of_scorers,
    "sessions": of_sessions,
    "steps": of_steps,
    "files": of_files,
    "export": of_export,
}
COMPUTING = ("ops", "layers", "streams", "scorers", "sessions")


def everything(groups: Any = COMPUTING) -> Iterator[tuple[str, Scenario]]:
    for group in groups:
        yield from GROUPS[group]().items()


class Expected:
    """A scenario's results when nothing goes wrong."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        thing = scenario.make()
        self.before = bits(scenario.seen(thing))
        self.after_before = bits(scenario.follow(thing))
        thing = scenario.make()
        self.result = bits(scenario.act(thing))
        self.after = bits(scenario.seen(thing))
        self.after_after = bits(scenario.follow(thing))

    def check(self, thing: Any, failed: bool, result: Any) -> None:
        """A call that failed has changed the object wholly or not at all; the object goes on as it should then."""
        if not failed:
            assert bits(result) == self.result, "there is no error, but the result is wrong"
        seen = bits(self.scenario.seen(thing))
        assert seen == self.after or (failed and seen == self.before), "what is left is neither old nor new"
        after = self.after_after if seen == self.after else self.after_before
        assert bits(self.scenario.follow(thing)) == after, "the result of what it does next is wrong"
