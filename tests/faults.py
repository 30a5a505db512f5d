"""Calls of every kind, and what may go wrong in the middle of them: a script that test_faults.py runs in children.

A scenario makes an object, does one thing with it, and says what can be seen of the object and what it does next.
An injector stops that one thing at its n-th allocation, or where Ctrl-C may strike for the n-th time. Then there is the
expected error or the right result, what is seen is what was there before or what should be there after, and what the
object does next is right for that.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import re
import resource
import select
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dis import opname
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bits import bits, like, same
from cases import arguments

import blockcell
from blockcell import GRU, LSTM, Bidirectional, Stack, ops, raw_ops
from blockcell.optable import OPS

T, B, I, H = 6, 16, 32, 64  # noqa: E741
# Two threads split these rows.
SECONDS = 20  # after which a child that hangs is killed


def nothing(thing: Any = None) -> None:
    return None


@dataclass
class Scenario:
    make: Callable[[], Any]
    act: Callable[[Any], Any]
    seen: Callable[[Any], Any] = nothing
    """What can be seen of the object; looking changes nothing."""
    follow: Callable[[Any], Any] = nothing
    """What it does next."""


def uniform(*shape: int, dtype: Any = np.float32, seed: int = 0, width: float = 1.0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(-width, width, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------------------ scenarios
def of_ops() -> dict[str, Scenario]:
    found = {}
    for name, op in OPS.items():
        args = arguments(name, {"T": T, "B": B, "I": I, "H": H})
        call = getattr(raw_ops if hasattr(raw_ops, name) else ops, name)
        converted = args | {op.inputs[0].name: args[op.inputs[0].name].tolist()}

        def into(out: Any, call: Any = call, args: Any = args) -> Any:
            return call(**args, out=out)

        found[name] = Scenario(lambda args=args: args, lambda args, call=call: call(**args), bits)  # type: ignore[misc]
        found[f"{name} out"] = Scenario(lambda call=call, args=args: call(**args), into)  # type: ignore[misc]
        found[f"{name} list"] = Scenario(  # type: ignore[misc]
            lambda args=converted: args, lambda args, call=call: call(**args), bits
        )
    return found


def kinds() -> dict[str, Any]:
    return {
        "LSTM": LSTM.init(I, H, seed=0, use_peephole=True, cell_clip=0.5),
        "LSTM half": LSTM.init(I, H, seed=0, dtype=np.float16),
        "GRU": GRU.init(I, H, seed=1),
        "stack": Stack([LSTM.init(I, H, seed=2), Stack([GRU.init(H, 40, seed=3), LSTM.init(40, H, seed=4)])]),
        "bidirectional": Stack(
            [Bidirectional(GRU.init(I, H, seed=5), LSTM.init(I, H, seed=6)), LSTM.init(2 * H, H, seed=7)]
        ),
    }


def halved(layer: Any) -> dict[str, np.ndarray]:
    return {name: array * array.dtype.type(0.5) for name, array in layer.weights.items()}


def of_layers() -> dict[str, Scenario]:
    found = {}
    for name, layer in kinds().items():
        x, d_y = uniform(T, B, I, dtype=layer.dtype), uniform(T, B, layer.output_size, dtype=layer.dtype)
        state = like(layer(x)[1], np.copy)
        lists = x.tolist(), like(state, np.ndarray.tolist)
        rows = {"lengths": np.arange(B) % (T + 1), "reset": np.arange(T * B).reshape(T, B) % 5 == 0}
        new = halved(layer)
        tapes = layer.forward(x, state)[2], layer.forward(x, **rows)[2]

        def trained(layer: Any, x: Any = x, d_y: Any = d_y, **options: Any) -> Any:
            y, last, tape = layer.forward(x, **options)
            return y, last, layer.backward(tape, d_y)

        acts = {
            "call": lambda layer, x=x: layer(x),
            "call state": lambda layer, x=x, state=state: layer(x, state),
            "call rows": lambda layer, x=x, rows=rows: layer(x, **rows),
            "call list": lambda layer, lists=lists: layer(*lists),
            "call strided": lambda layer, x=x: layer(x[::-1]),
            "forward": lambda layer, x=x: layer.forward(x)[:2],
            "forward rows": lambda layer, x=x, state=state, rows=rows: layer.forward(x, state, **rows)[:2],
            "both": trained,
            "both rows": partial(trained, **rows),
            "backward": lambda layer, tape=tapes[0], d_y=d_y, state=state: tape.layer.backward(tape, d_y, state),
            "backward rows": lambda layer, tape=tapes[1], d_y=d_y: tape.layer.backward(tape, d_y[::-1]),
            "set_weights": lambda layer, new=new: layer.set_weights(**new),
            "copy": lambda layer: copy.copy(layer).weights,
            "pickle": lambda layer: pickle.loads(pickle.dumps(layer)).weights,
        }
        for what, act in acts.items():
            make = partial(copy.copy, layer) if what == "set_weights" else lambda layer=layer: layer
            found[f"{name}: {what}"] = Scenario(make, act, lambda layer, x=x: (layer.weights, layer(x)), trained)
    for kind in (LSTM, GRU):
        found[f"{kind.__name__}: init"] = Scenario(nothing, lambda _, kind=kind: kind.init(5, 7, seed=0).weights)  # type: ignore[misc]
    return found


def of_streams() -> dict[str, Scenario]:
    found = {}
    streamed = {name: layer for name, layer in kinds().items() if name != "bidirectional"}
    # Steps of these use threads.
    wide = {"wide LSTM": LSTM.init(64, 256, seed=8), "wide GRU": GRU.init(64, 256, seed=9)}
    for name, layer in (streamed | wide).items():
        x = uniform(2 * T, B, layer.input_size, dtype=layer.dtype)
        states = like(layer(x)[1], np.copy)
        lists, states_list = x.tolist(), like(states, np.ndarray.tolist)
        new = layer.weights if name in wide else halved(layer)

        def make(layer: Any = layer, x: Any = x) -> Any:
            stream = layer.stream(B)
            stream.run(x[:2])
            return stream

        def with_new_weights(layer: Any = layer, make: Any = make, new: Any = new) -> Any:
            stream = make(copy.copy(layer))
            stream.layer.set_weights(**new)
            return stream

        def go_on(stream: Any, x: Any = x) -> Any:
            return stream.step(x[0]), stream.run(x), stream.state, stream.step(x[1]), stream.state

        def seen(stream: Any, go_on: Any = go_on) -> Any:
            return stream.state, go_on(copy.copy(stream))

        def out(*steps: int, layer: Any = layer) -> np.ndarray:
            return np.empty((*steps, B, layer.output_size), layer.dtype)

        acts = {
            "step": lambda stream, x=x: stream.step(x[0]),
            "step out": lambda stream, x=x, out=out: stream.step(x[0], out=out()),
            "step list": lambda stream, x=lists: stream.step(x[0]),
            "step strided": lambda stream, x=x: stream.step(x[0, ::-1]),
            "run": lambda stream, x=x: stream.run(x[:2]),
            "run longer": lambda stream, x=x: stream.run(x),
            "run out": lambda stream, x=x, out=out: stream.run(x[:T], out=out(T)),
            "run list": lambda stream, x=lists: stream.run(x),
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
            if name not in wide or what in ("step", "step out", "run"):
                begin = with_new_weights if what == "refresh" else make
                found[f"{name}: {what}"] = Scenario(begin, act, seen, go_on)
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
    return found


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


GROUPS = {"ops": of_ops, "layers": of_layers, "streams": of_streams, "files": of_files, "export": of_export}
COMPUTING = ("ops", "layers", "streams")


# ------------------------------------------------------------------------------------------------------------ injectors
class Allocations:
    """Of Python's objects: MemoryError from the n-th."""

    error: type[BaseException] = MemoryError

    def arm(self, n: int) -> None:
        import _testcapi

        self.n, self.release = n, _testcapi.remove_mem_hooks
        _testcapi.set_nomemory(n - 1, n)

    def disarm(self) -> bool:
        """Whether the n-th was reached: if not, there is still one to fail."""
        try:
            for _ in range(self.n + 100):
                object()
            return True
        except MemoryError:
            return False
        finally:
            self.release()


class Mallocs:
    """Of the C library, from which large arrays and scratch come: NULL from the n-th of this thread."""

    error: type[BaseException] = MemoryError

    def __init__(self) -> None:
        shim = ctypes.CDLL(None)
        self.begin, self.end = shim.malloc_fails_at, shim.mallocs_seen
        self.begin.argtypes, self.end.restype = [ctypes.c_long], ctypes.c_long

    def arm(self, n: int) -> None:
        self.n = n
        self.begin(n)

    def disarm(self) -> bool:
        return bool(self.end() >= self.n)


class Interrupts:
    """KeyboardInterrupt at the n-th of the places where Python looks for signals: after calls, at loops' ends."""

    error: type[BaseException] = KeyboardInterrupt
    LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")

    def arm(self, n: int) -> None:
        self.left, self.before = n, {}  # type: ignore[var-annotated]
        sys.settrace(self.trace)

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self.before.pop(frame, None)
        elif event == "opcode" and self.left > 0:
            before = self.before.get(frame, "")
            self.before[frame] = opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(self.LOOKS):
                self.left -= 1
                if self.left == 0:
                    raise self.error
        return self.trace

    def disarm(self) -> bool:
        sys.settrace(None)
        self.before = {}
        return self.left == 0


class Errors(Interrupts):
    """MemoryError there, for a library that does not bear one inside: protobuf crashes."""

    error = MemoryError


CRASH_THEMSELVES = {  # in numpy: its random, and the hash of a dtype that is not its own
    "allocations": (": init", ": pickle"),
}
INJECTORS: dict[str, type[Any]] = {
    "allocations": Allocations, "mallocs": Mallocs, "interrupts": Interrupts, "errors": Errors
}  # fmt: skip


def attempt(injector: Any, n: int, act: Callable[[], Any]) -> tuple[bool, bool, Any]:
    """Whether the n-th was reached, whether that was an error, and otherwise the result."""
    failed, reached, result = True, True, None
    try:
        try:
            injector.arm(n)
            result = act()
            failed = False
        finally:
            reached = injector.disarm()
    except injector.error:
        pass
    except Exception as error:
        if not stands_for(error, injector.error):
            raise
    return reached, failed, result


def stands_for(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether Python or numpy made another error of it: a lock's, or while cleaning up."""
    known = {
        RuntimeError: r"can't allocate .*lock",
        SystemError: "^(?!<cyfunction).*exception",  # not ours
        pickle.PicklingError: "import of module .* failed",
        TypeError: "not PosixPath$",
        AttributeError: r"^'numpy\.dtypes",
    }
    if any(isinstance(error, type_) and re.search(text, str(error)) for type_, text in known.items()):
        return True
    while error.__context__ is not None and error.__cause__ is None:
        error = error.__context__
    return isinstance(error, kind)


class Expected:
    """What a scenario gives undisturbed."""

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
        """Either it was done or it was not; in both cases the object is as good as ever."""
        if not failed:
            assert bits(result) == self.result, "the result is another one, without an error"
        seen = bits(self.scenario.seen(thing))
        assert seen == self.after or (failed and seen == self.before), "what is left is neither old nor new"
        after = self.after_after if seen == self.after else self.after_before
        if self.before == self.after and self.after_before != self.after_after:
            return
        assert bits(self.scenario.follow(thing)) == after, "what it does next is another result"


def inject(injector: Any, scenario: Scenario, name: str, count: int, seed: int = 0) -> str:
    """Try every n, or `count` of them; how many errors there were."""
    for _ in range(3):  # whatever is made once
        expected = Expected(scenario)

    def reached(n: int) -> bool:
        os.write(2, f"{name}: {n}\n".encode())  # the last words before a crash
        thing = scenario.make()
        hit, failed, result = attempt(injector, n, lambda: scenario.act(thing))
        errors.append(failed)
        expected.check(thing, failed, result)
        return hit

    errors: list[bool] = []
    if not count:
        n = missed = 0
        while missed < 3:  # once is not enough: what Python keeps for reuse differs from run to run
            n += 1
            missed = 0 if reached(n) else missed + 1
        return f"{name}: {sum(errors)} errors at {n} places"
    last = 1
    while reached(last):
        last *= 2
    places = range(1, last + 1)
    for n in places if last <= count else sorted(random.Random(seed).sample(places, count)):
        reached(n)
    return f"{name}: {sum(errors)} errors at {len(errors)} places of up to {last}"


def disturb(what: str, group: str, count: str = "0", threads: str = "2", only: str = "") -> None:
    gc.disable()
    blockcell.set_num_threads(int(threads))
    injector, failures = INJECTORS[what](), []
    for name, scenario in GROUPS[group]().items():
        if only in name and not name.endswith(CRASH_THEMSELVES.get(what, ())):
            try:
                print(inject(injector, scenario, name, int(count)), flush=True)
            except Exception as error:  # the next one shall have its turn
                import traceback

                failures.append(f"{name}: {error!r}")
                traceback.print_exc()
    assert not failures, "\n".join(failures)


# ------------------------------------------------------------------------------------------------------------ all calls
def everything(groups: Any = COMPUTING) -> Iterator[tuple[str, Scenario]]:
    for group in groups:
        yield from GROUPS[group]().items()


def without_threads(limit: str, before: str) -> None:
    """No thread can be started, or no more than there are: the same bits, and a warning for each number asked for."""
    blockcell.set_num_threads(1)
    calls = [(name, scenario, Expected(scenario)) for name, scenario in everything()]
    if limit == "processes" and os.getuid() == 0:  # whom that limit does not bind
        os.setuid(65534)
    blockcell.set_num_threads(int(before))
    for _, scenario, expected in calls:  # memory and threads that are there
        expected.check(thing := scenario.make(), False, scenario.act(thing))
    if limit == "processes":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    else:  # less than a stack
        resource.setrlimit(resource.RLIMIT_AS, (used() + (6 << 20), resource.RLIM_INFINITY))
    try:
        threading.Thread(target=nothing, args=(0,)).start()
    except RuntimeError:
        pass
    else:
        raise AssertionError("a thread could be started: this shows nothing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for threads in (2, 3, 8, 64):
            blockcell.set_num_threads(threads)
            for name, scenario, expected in calls:
                os.write(2, f"{name} on {threads}\n".encode())
                expected.check(thing := scenario.make(), False, scenario.act(thing))
    print([str(warning.message) for warning in caught])
    assert len(caught) <= 4, caught
    assert all(w.category is RuntimeWarning and "thread" in str(w.message) for w in caught)
    if limit != "processes":  # now there are threads again
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for _, scenario, expected in calls:
            expected.check(thing := scenario.make(), False, scenario.act(thing))


def used() -> int:
    """The address space in use, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def little_memory() -> None:
    """Large arrays cannot be had: MemoryError, and the object is as it was. Later there is memory again."""
    steps = 10_000
    x = uniform(steps, B, I)
    sequence = arguments("BlockLSTM", {"T": 1, "B": B, "I": I, "H": H}) | {"x": x, "seq_len_max": steps}
    layers = {name: layer for name, layer in kinds().items() if name != "LSTM half"}
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "BlockLSTM": (lambda: raw_ops.BlockLSTM(**sequence), lambda: 0)
    }
    for name, layer in layers.items():
        y, _, tape = layer.forward(x)
        calls |= {
            f"{name}: call": (lambda layer=layer: layer(x), lambda: 0),
            f"{name}: call lengths": (lambda layer=layer: layer(x, lengths=np.full(B, steps - 1)), lambda: 0),
            f"{name}: forward": (lambda layer=layer: layer.forward(x)[:2], lambda: 0),
            f"{name}: backward": (lambda layer=layer, tape=tape, y=y: layer.backward(tape, y), lambda: 0),
        }
        if name != "bidirectional":
            stream = layer.stream(B)
            stream.run(x[:3])
            calls |= {
                f"{name}: run": (lambda stream=stream: stream.run(x), lambda stream=stream: stream.state),
                f"{name}: stream": (lambda layer=layer: layer.stream(10**6), lambda: 0),
            }
    resource.setrlimit(resource.RLIMIT_AS, (used() + (16 << 20), resource.RLIM_INFINITY))
    for name, (call, state) in calls.items():
        os.write(2, f"{name}\n".encode())
        before = bits(state())
        for _ in range(2):
            try:
                call()
            except MemoryError:
                pass
            else:
                raise AssertionError(f"{name}: there was memory: this shows nothing")
            assert bits(state()) == before, name
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for name, layer in layers.items():
        y = layer(x)[0]
        assert same(layer.forward(x)[0], y) and same(calls[f"{name}: call"][0]()[0], y)
        if name != "bidirectional":
            assert same(calls[f"{name}: run"][0](), layer(x, layer(x[:3])[1])[0])


# ---------------------------------------------------------------------------------------------------------------- forks
def in_child(work: Callable[[], None]) -> int:
    """What a forked child exits with; one that hangs is killed."""
    child = os.fork()
    if child == 0:
        faulthandler.register(signal.SIGALRM, chain=True)  # says where
        signal.alarm(SECONDS)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_all(calls: Any) -> None:
    for name, thing, scenario, expected in calls:
        os.write(2, f"{os.getpid()} {name}\n".encode())
        expected.check(thing, False, scenario.act(thing))


def prepared(groups: Any = COMPUTING, only: str = "") -> list[Any]:
    """Objects made here, for others to use."""
    found = [(name, scenario) for name, scenario in everything(groups) if only in name]
    return [(name, scenario.make(), scenario, Expected(scenario)) for name, scenario in found]


def running() -> int:
    """The threads that this process has."""
    return len(os.listdir("/proc/self/task"))


def threads_of_steps() -> None:
    """A stream's steps use as many threads as there shall be now, not as there were when it was made."""
    layer = GRU.init(64, 256, seed=0)
    x, before = uniform(B, 64), running()
    blockcell.set_num_threads(2)
    stream = layer.stream(B)
    blockcell.set_num_threads(1)
    first = stream.step(x)
    assert running() == before, "a step took two threads"
    blockcell.set_num_threads(2)
    stream.step(x)
    assert running() == before + 1, "a step took one thread"
    assert same(first, layer(x[None])[0][0])


def fork_after(threads: str, only: str = "") -> None:
    """A child uses what its parent made and used with threads; so does its own child."""
    blockcell.set_num_threads(int(threads))
    calls = prepared((*COMPUTING, "files"), only)
    assert in_child(lambda: check_all(calls)) == 0
    assert in_child(lambda: (check_all(prepared()), exit_unless(in_child(lambda: check_all(prepared())) == 0))) == 0  # type: ignore[arg-type]
    check_all(calls)


def exit_unless(good: bool) -> None:
    assert good


class Signalling:
    """An array whose conversion lets another thread fork meanwhile."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.inside, self.go_on = array, threading.Event(), threading.Event()

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.inside.set()
        self.go_on.wait(SECONDS)
        return self.array


def fork_inside(what: str) -> None:
    """Another thread is in the middle of a call: its child can make the same call, of a layer or a new stream."""
    blockcell.set_num_threads(2)
    layer = kinds()["stack"]
    x, stream = uniform(T, B, I), layer.stream(B)
    expected, new = bits(layer(x)), halved(layer)
    stream.run(x[:1])
    weight = Signalling(new["0.w"])
    given = Signalling(x[1] if what == "step" else x)
    call = {
        "set_weights": lambda: layer.set_weights(**new | {"0.w": weight}),
        "step": lambda: stream.step(given),
        "run": lambda: stream.run(given),
        "call": lambda: layer(given),
    }[what]
    signalling = weight if what == "set_weights" else given

    def child() -> None:
        assert bits(layer(x)) == expected
        if what in ("step", "run"):  # the stream is in use by a thread that is no more; it may say so, but not hang
            try:
                stream.step(x[1])
                stream.state = stream.state
                stream.reset()
            except RuntimeError as error:
                print(error, file=sys.stderr)
        assert bits(layer.stream(B).run(x)) == expected[0]
        layer.set_weights(**new)
        changed = copy.copy(layer)(x)
        assert bits(changed) != expected and same(layer(x), changed)

    other = threading.Thread(target=call)
    other.start()
    assert signalling.inside.wait(SECONDS)
    status = in_child(child)
    signalling.go_on.set()
    other.join()
    assert status == 0, status


def fork_during(children: str) -> None:
    """Other threads go on with calls of all kinds."""
    blockcell.set_num_threads(2)
    calls, done = prepared(), threading.Event()
    layer = kinds()["stack"]
    x, old, new = uniform(T, B, I), layer.weights, halved(layer)
    possible = []
    for weights in (new, old):
        layer.set_weights(**weights)
        possible.append(bits(layer(x)))

    def busy(k: int) -> None:
        own = prepared()[k::3]
        while not done.is_set():
            for _, thing, scenario, _ in own:
                scenario.act(thing)

    def swapping() -> None:
        while not done.is_set():
            for weights in (new, old):
                layer.set_weights(**weights)

    def child(k: int) -> None:
        assert bits(layer(x)) in possible
        for weights, expected in zip((new, old), possible, strict=True):
            layer.set_weights(**weights)
            assert bits(layer(x)) == expected
        check_all(calls[k::5])

    others = [threading.Thread(target=busy, args=(k,)) for k in range(3)] + [threading.Thread(target=swapping)]
    for thread in others:
        thread.start()
    try:
        statuses = [in_child(partial(child, k)) for k in range(int(children))]
    finally:
        done.set()
        for thread in others:
            thread.join()
    assert not any(statuses), statuses
    check_all(calls)


# ------------------------------------------------------------------------------------------------------ multiprocessing
def elsewhere(job: tuple[Any, np.ndarray]) -> Any:
    """In another process, with a stream or a layer that came as a pickle."""
    thing, x = job
    signal.alarm(SECONDS)
    blockcell.set_num_threads(2)
    return (thing.run(x), thing.state) if hasattr(thing, "run") else thing(x)


def processes(method: str) -> None:
    blockcell.set_num_threads(2)
    jobs, expected = [], []
    for name, layer in kinds().items():
        x = uniform(2 * T, B, I, dtype=layer.dtype)
        jobs.append((layer, x))
        expected.append(bits(layer(x)))
        if name != "bidirectional":
            stream = layer.stream(B)
            stream.run(x[:T])
            jobs.append((stream, x[T:]))
            expected.append(bits(layer(x[T:], layer(x[:T])[1])))
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert [bits(result) for result in pool.map(elsewhere, jobs)] == expected


# --------------------------------------------------------------------------------------------------------------- Ctrl-C
def signals(count: str, seed: str) -> None:
    """SIGINT at random moments of calls, in kernels and around them."""
    blockcell.set_num_threads(2)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    g, inside = random.Random(int(seed)), 0
    calls = [(name, scenario, Expected(scenario)) for name, scenario in everything()]
    for k in range(int(count)):
        name, scenario, expected = g.choice(calls)
        os.write(2, f"{k} {name}\n".encode())
        thing, failed, result = scenario.make(), True, None
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** g.uniform(-5, -2.5))
            result = scenario.act(thing)
            failed = False
            while True:
                select.select([], [], [], 1)  # it comes here at the latest; an Event would keep its lock
        except KeyboardInterrupt:
            pass
        inside += failed
        expected.check(thing, failed, result)
    print(f"{inside} of {count} inside a call")


# ----------------------------------------------------------------------------------------------------- a single stream
def one_stream(calls: str) -> None:
    """Several threads use one stream at once: each call works or is a RuntimeError, and later it is as good as new."""
    layers = {name: layer for name, layer in kinds().items() if name != "bidirectional"}
    for name, layer in layers.items():
        stream, x = layer.stream(B), uniform(2 * T, B, I, dtype=layer.dtype)
        states = like(layer(x)[1], np.copy)
        refused: list[RuntimeError] = []
        failures: list[BaseException] = []

        def use(
            seed: int,
            stream: Any = stream,
            x: Any = x,
            states: Any = states,
            refused: Any = refused,
            failures: Any = failures,
        ) -> None:
            g = random.Random(seed)
            does = (
                lambda: stream.step(x[0]),
                lambda: stream.run(x[: g.randrange(2 * T)]),
                lambda: stream.state,
                lambda: setattr(stream, "state", states),
                lambda: stream.reset([1]),
                lambda: stream.refresh(),
                lambda: pickle.dumps(stream),
                lambda: blockcell.set_num_threads(g.randrange(1, 4)),
            )
            for _ in range(int(calls)):
                try:
                    g.choice(does)()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    refused.append(error)
                except BaseException as error:
                    failures.append(error)
                    raise

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        print(f"{name}: {len(refused)} refused")
        stream.reset()
        assert same(stream.run(x), layer(x)[0]) and same(stream.state, layer(x)[1])


MODES = {
    function.__name__: function
    for function in (
        disturb,
        without_threads,
        little_memory,
        threads_of_steps,
        fork_after,
        fork_inside,
        fork_during,
        processes,
        signals,
        one_stream,
    )
}

if __name__ == "__main__":
    faulthandler.enable()
    MODES[sys.argv[1]](*sys.argv[2:])
