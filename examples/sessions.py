"""Serving many sessions at once: whoever has input takes part in the next step, whenever it comes.

A server on a local socket takes each connection for a session: packets of features come in, for every step of a packet
one row of scores goes back.  It is plain asyncio around `blockcell.Sessions`: readers feed, one task steps all sessions
that have something waiting, in a thread, and connections open and close meanwhile.

    python examples/sessions.py [--sessions 500] [--seconds 3] [--quick]

A client in another process opens the sessions at random times and sends packets at random times.  Then it compares all
scores with those of each session alone, bit for bit.  If onnxruntime is installed, two more servers get the same
packets: one runs one session after the other, one gathers their states into a batch itself.  Everything computes on one
thread.  The weights are random, because this is about speed.  The only package needed is blockcell.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import blockcell
from blockcell import LSTM, Dense, Sessions, Stack

try:
    import onnxruntime

    from onnx_export import export
except ImportError:
    onnxruntime = None

FEATURES, HIDDEN, SCORES = 40, 128, 16
STEPS = 10  # of a packet
INTERVAL = 0.1  # seconds between packets of a session, on average


def network():
    layers = [
        LSTM.init(FEATURES, HIDDEN, seed=1),
        LSTM.init(HIDDEN, HIDDEN, seed=2),
        Dense.init(HIDDEN, SCORES, seed=3),
    ]
    return Stack(layers)


# ----------------------------------------------------------------------------------------------------------- the server
async def serve(engine, path, ended):
    """Serve until `ended` returns, in a thread; returns the seconds that steps took."""
    writers, fed, busy = {}, asyncio.Event(), 0.0

    async def session(reader, writer):
        id = engine.open()
        writers[id] = writer
        try:
            while True:
                packet = await reader.readexactly(STEPS * FEATURES * 4)
                engine.feed(id, np.frombuffer(packet, np.float32).reshape(STEPS, FEATURES))
                fed.set()
        except asyncio.IncompleteReadError:  # the client has closed it
            pass
        finally:
            del writers[id]
            engine.close(id)
            writer.close()

    async def stepping():
        nonlocal busy
        while await fed.wait():
            fed.clear()
            start = time.perf_counter()
            results = await asyncio.to_thread(engine.step)
            busy += time.perf_counter() - start
            for id, y in results.items():
                if id in writers:
                    writers[id].write(y.tobytes())

    async with await asyncio.start_unix_server(session, path):
        task = asyncio.create_task(stepping())
        await asyncio.to_thread(ended)
        task.cancel()
    return busy


def run_server(name, path, pipe):
    """In a process of its own."""
    blockcell.set_num_threads(1)
    sys.setswitchinterval(0.0002)  # else a step waits for up to 5 ms until a busy event loop gives the interpreter back
    engine = ENGINES[name](network())
    pipe.send("ready")
    pipe.send(asyncio.run(serve(engine, path, pipe.recv)))


# -------------------------------------------------------------------------------------------- the same with onnxruntime
class OneAtATime:
    """What `Sessions` does, by a run of the model for each session that has input."""

    def __init__(self, net):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        model = export(net, None, loop="native").SerializeToString()
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_inputs()[2:]]  # after x and lengths
        self.zeros = [np.zeros((1, HIDDEN), np.float32) for _ in self.names]
        self.states, self.waiting, self.ids, self.lock = {}, {}, itertools.count(), threading.Lock()

    def open(self):
        id = next(self.ids)
        self.states[id] = self.zeros
        return id

    def feed(self, id, x):
        with self.lock:
            self.waiting.setdefault(id, []).append(x)

    def close(self, id):
        self.states.pop(id)

    def step(self):
        with self.lock:
            waiting, self.waiting = self.waiting, {}
        found = {id: (np.concatenate(packets), self.states.get(id)) for id, packets in waiting.items()}
        return self.run({id: (x, states) for id, (x, states) in found.items() if states is not None})

    def run(self, waiting):
        results = {}
        for id, (x, states) in waiting.items():
            feeds = {"x": x[:, None], "lengths": np.array([len(x)]), **dict(zip(self.names, states, strict=True))}
            y, *last = self.session.run(None, feeds)
            results[id] = y[:, 0]
            self.keep(id, last)
        return results

    def keep(self, id, states):
        if id in self.states:  # else it was closed meanwhile
            self.states[id] = states


class GatheredByNumpy(OneAtATime):
    """The same by one run, of a batch that it gathers and pads."""

    def run(self, waiting):
        if not waiting:
            return {}
        inputs, states = zip(*waiting.values(), strict=True)
        lengths = np.array([len(x) for x in inputs])
        x = np.zeros((lengths.max(), len(inputs), FEATURES), np.float32)
        for k, each in enumerate(inputs):
            x[: len(each), k] = each
        gathered = [np.concatenate(rows) for rows in zip(*states, strict=True)]
        y, *last = self.session.run(None, {"x": x, "lengths": lengths, **dict(zip(self.names, gathered, strict=True))})
        for k, id in enumerate(waiting):
            self.keep(id, [array[k : k + 1].copy() for array in last])
        return {id: y[: lengths[k], k] for k, id in enumerate(waiting)}


ENGINES = {
    "blockcell.Sessions": Sessions,
    "onnxruntime, one at a time": OneAtATime,
    "onnxruntime, gathered by numpy": GatheredByNumpy,
}


# ----------------------------------------------------------------------------------------------------------- the client
def traffic(sessions, seconds):
    """For each session when its packets are sent, and what is in them."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(sessions):
        times = rng.uniform(0, seconds / 2) + np.cumsum(rng.exponential(INTERVAL, int(9 + 3 * seconds / INTERVAL)))
        times = times[: max(1, np.searchsorted(times, seconds))]
        found.append((times, rng.standard_normal((len(times), STEPS, FEATURES), np.float32)))
    return found


async def send(path, packets, start, latencies, ends):
    """One session: its scores."""
    times, x = packets
    await asyncio.sleep(start + times[0] - time.perf_counter())
    reader, writer = await asyncio.open_unix_connection(path)

    async def receive():
        y = []
        for at in times:
            y.append(np.frombuffer(await reader.readexactly(STEPS * SCORES * 4), np.float32))
            latencies.append(time.perf_counter() - start - at)
        ends.append(time.perf_counter() - start)
        return np.concatenate(y).reshape(-1, SCORES)

    receiving = asyncio.create_task(receive())
    for at, packet in zip(times, x, strict=True):
        await asyncio.sleep(start + at - time.perf_counter())
        writer.write(packet.tobytes())
    y = await receiving
    writer.close()
    return y


async def send_all(path, sessions):
    """The scores of all sessions, the latencies of all packets, and how long it took."""
    latencies, ends, start = [], [], time.perf_counter()
    scores = await asyncio.gather(*[send(path, packets, start, latencies, ends) for packets in sessions])
    return scores, latencies, max(ends)


def measure(name, sessions):
    """What the client sees of one server, and the seconds that its steps took."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path, (here, there) = str(Path(folder) / "socket"), context.Pipe()
        server = context.Process(target=run_server, args=(name, path, there), daemon=True)
        server.start()
        there.close()
        here.recv()
        while not Path(path).exists():
            time.sleep(0.01)
        scores, latencies, took = asyncio.run(send_all(path, sessions))
        here.send("end")
        busy = here.recv()
        server.join()
    return scores, latencies, took, busy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3, help="for which packets are sent")
    parser.add_argument("--quick", action="store_true", help="40 sessions, half a second")
    options = parser.parse_args()
    sessions = traffic(*((40, 0.5) if options.quick else (options.sessions, options.seconds)))
    packets, net = sum(len(times) for times, _ in sessions), network()
    alone = [net(x.reshape(-1, 1, FEATURES))[0][:, 0] for _, x in sessions]
    print(f"{len(sessions)} sessions, {packets} packets of {STEPS} steps")
    print(f"{'':32}{'latency, ms':>16}{'thousand steps a second':>26}")
    print(f"{'':32}{'median':>8}{'99 %':>8}{'served':>13}{'possible':>13}")
    same = True
    for name in ENGINES:
        if ENGINES[name] is not Sessions and not onnxruntime:
            continue
        scores, latencies, took, busy = measure(name, sessions)
        median, late = np.quantile(latencies, (0.5, 0.99)) * 1e3
        rates = [packets * STEPS / seconds / 1e3 for seconds in (took, busy)]
        print(f"{name:32}{median:8.1f}{late:8.1f}{rates[0]:13.1f}{rates[1]:13.1f}", flush=True)
        if ENGINES[name] is Sessions:
            same = all(np.array_equal(y, expected) for y, expected in zip(scores, alone, strict=True))
        else:
            assert all(np.allclose(y, expected, atol=1e-4) for y, expected in zip(scores, alone, strict=True))
    print("Sessions: the same bits as each session alone" if same else "Sessions: not the bits of each session alone")
    return same


if __name__ == "__main__":
    sys.exit(not main())
