"""How benchmarks measure on a machine that is disturbed, and what they make of it, which needs no times to test."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PATHS = [*sys.path]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench  # noqa: E402
import candidates  # noqa: E402
import machine  # noqa: E402
import report  # noqa: E402
import torch_modules  # noqa: E402
import turns  # noqa: E402

sys.path[:] = PATHS  # to which they add this checkout, which need not be where the package is

SIZES = {"T": 20, "B": 4, "I": 16, "H": 16}


class Machine:
    """Has cores of the same speed; ``shared`` says whether two of them are one."""

    def __init__(self, speed=100.0, shared=False):
        self.speed, self.shared = speed, shared

    def rate(self, threads):
        return self.speed * (1 if self.shared else threads)


# --------------------------------------------------------------------------------------------------------- the programs
ROOT = Path(turns.__file__).resolve().parents[1]
PROGRAMS = sorted(ROOT.glob("benchmarks/*.py"))
MODULES = {"turns", "candidates"}  # which others import


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_each_program_is_needed(program):
    """Its docstring names the pages that have its figures, or the make target that runs it, and these name it."""
    tree = ast.parse(program.read_text())
    if program.stem in MODULES:
        users = [path for path in PROGRAMS if re.search(rf"^(from|import) {program.stem}\b", path.read_text(), re.M)]
        assert len(users) > 2
        return
    [needs] = re.findall(r"^Needed by: (.*)", ast.get_docstring(tree), re.MULTILINE)
    for need in re.split("[,;] ", needs):
        target = need.removeprefix("make ")
        makefile = (ROOT / "Makefile").read_text().partition(f"\n{target}:")[2].partition("\n\n")[0]
        text = makefile if need.startswith("make ") else (ROOT / need).read_text()
        assert f"benchmarks/{program.name}" in text, f"{need} does not name {program.name}"


# ------------------------------------------------------------------------------------------------------------ the marks
@pytest.mark.parametrize(
    "threads, speed, gain, disturbed",
    [
        (1, 100, 2.0, False),
        (1, 100, 1.0, False),  # what two threads reach does not matter to one
        (1, 76, 2.0, False),
        (1, 74, 2.0, True),
        (2, 100, 1.61, False),
        (2, 100, 1.59, True),
        (2, 80, 1.99, False),
        (2, 74, 2.0, True),
    ],
)
def test_disturbed(threads, speed, gain, disturbed):
    rates = {1: 100.0, 2: 200.0}
    watch = turns.Watch([], rates.__getitem__)
    rates |= {1: speed, 2: gain * speed}
    assert watch.is_disturbed(threads) is disturbed


def test_the_best_rate_is_the_best_seen():
    machine = Machine(speed=60)
    watch = turns.Watch([], machine.rate)
    machine.speed = 100
    assert not watch.is_disturbed(1)
    machine.speed = 60
    assert watch.is_disturbed(1)


@pytest.mark.parametrize("when", ["before", "meanwhile", "after", "never"])
def test_a_round_is_marked(when):
    machine, worker = Machine(), SimpleNamespace(waited=0.5)  # in another round
    watch = turns.Watch([worker], machine.rate)
    machine.shared = when == "before"

    def measure():
        worker.waited = 0.06 if when == "meanwhile" else 0.04
        machine.shared = when == "after"
        return "times"

    assert watch.round(2, measure) == ("times", when != "never")


def test_marked_rounds_are_repeated_but_not_for_ever(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        machine, count, marks = Machine(), int(rng.integers(1, 7)), []
        watch = turns.Watch([], machine.rate)

        def measure(machine=machine, marks=marks):
            marks.append(bool(rng.integers(2)))
            machine.shared = marks[-1]

        rounds = watch.rounds(2, measure, count)
        # one that is disturbed at its end disturbs the next one's beginning
        expected = [one or two for one, two in zip(marks, [False, *marks], strict=False)]
        assert [mark for _, mark in rounds] == expected
        assert expected.count(False) == count or len(rounds) == 2 * count
        assert expected[:-1].count(False) < count


@pytest.mark.parametrize(
    "marks, expected", [("000", [0, 1, 2]), ("01010", [0, 2, 4]), ("0011", [0, 1, 2, 3]), ("11", [0, 1]), ("0", [0])]
)
def test_marked_rounds_count_only_where_others_are_few(marks, expected):
    assert turns.select_rounds([(k, mark == "1") for k, mark in enumerate(marks)]) == expected


def test_spread():
    assert turns.spread([5.0, 1.0, 4.0, 2.0, 3.0]) == (3, 2, 4)
    assert turns.spread([1.0, 2.0]) == (1.5, 1.25, 1.75)
    assert turns.spread([7.0]) == (7, 7, 7)


def test_time_and_waiting_of_calls(monkeypatch):
    now, queued = 0.0, 10.0
    durations = iter([3.0, 1.0, 2.0, 9.0, 1.0])

    def call():
        nonlocal now, queued
        now += next(durations)
        queued += 0.5

    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(turns, "cpu_wait_seconds", lambda: queued)
    assert turns.seconds(call, budget=10.0) == 2.5  # the median of the first four, which take 15
    assert turns.waited == pytest.approx(4 * 0.5 / 15)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_ceiling_has_a_cpu_for_each_thread(threads):
    cpus, places = os.sched_getaffinity(0), []
    machine.time_threads(lambda k: places.append((k, frozenset(os.sched_getaffinity(0)))), threads, tries=3)
    assert sorted(k for k, _ in places) == sorted([*range(threads)] * 3)
    expected = {frozenset(cpus)} if threads == 1 else {frozenset([cpu]) for cpu in sorted(cpus)[:threads]}
    assert {mine for _, mine in places} == expected
    assert os.sched_getaffinity(0) == cpus


# ----------------------------------------------------------------------------------------------------------- the points
class Worker:
    """Answers with times in order; ends where one is None."""

    def __init__(self, *times):
        self.times, self.waited, self.started = list(times), 0.0, 0

    def ask(self, question):
        time = self.times.pop(0)
        if time is None:
            raise RuntimeError("ended")
        return time

    def start(self):
        self.started += 1


def measured(workers, teams, marks):
    point = bench.Point("LSTM inference", "float32", SIZES, teams)
    for mark in marks:
        point.rounds.append((point.ask(workers, 0.1), mark))
    return point


def figures(row):
    return [row[name] for name in ("candidate", "threads", "microseconds", "ratio", "low", "high", "rounds", "marked")]


def test_a_point_counts_unmarked_rounds_and_the_better_number_of_threads():
    workers = {
        ("blockcell", 1): Worker(1.0, 1.0, 9.0, 1.0),
        ("blockcell", 2): Worker(2.0, 2.0, 0.1, 2.0),
        ("torch", 1): Worker(4.0, 4.0, 9.0, 4.0),
        ("torch", 2): Worker(1.5, 2.5, 9.0, 1.0),
    }
    rows = measured(workers, [1, 2], [False, False, True, False]).rows()
    assert [figures(row) for row in rows] == [
        ["blockcell", 1, 1e6, 1.0, 1.0, 1.0, 4, 1],
        ["torch", 2, 1.5e6, 1.5, 1.25, 2.0, 4, 1],
    ]


def test_a_peer_whose_process_ends_is_left_out(capsys):
    peer, other = Worker(3.0, None, 3.0), Worker(6.0, 6.0, 6.0)
    workers = {("blockcell", 1): Worker(2.0, 2.0, 2.0), ("torch", 1): peer, ("openvino", 1): other}
    rows = measured(workers, [1], [False] * 3).rows()
    assert [figures(row)[:4] for row in rows] == [["blockcell", 1, 2e6, 1.0], ["openvino", 1, 6e6, 3.0]]
    assert (peer.started, peer.times) == (1, [3.0]) and "torch with 1 thread(s) is left out" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="ended"):
        measured({("blockcell", 1): Worker(None)}, [1], [False])


def test_all_points_take_turns_and_marked_ones_some_more(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        rounds, more = rng.integers([1, 0], 6).tolist()
        points = [[] for _ in range(rng.integers(1, 5))]
        chance, order = rng.uniform(size=len(points)), []
        for k in turns.take_turns(points, rounds, more):
            order.append(k)
            points[k].append((None, bool(rng.uniform() < chance[k])))
        assert order[: rounds * len(points)] == [*range(len(points))] * rounds
        for rounds_of_point in points:
            clean = sum(not marked for _, marked in rounds_of_point)
            assert clean == rounds or (len(rounds_of_point) == rounds + more and clean < rounds)


@pytest.mark.parametrize(
    "task, expected",
    [
        ("LSTM inference", 4 * 3 * 7 * (5 + 7) * 8),
        ("GRU training", 4 * 3 * 7 * (5 + 7) * 6 * 3),
        ("RNN inference", 4 * 3 * 7 * (5 + 7) * 2),
        ("LSTM(projected) inference", 4 * 3 * (7 * (5 + 3) * 8 + 7 * 3 * 2)),  # P = 3
        ("LSTM(projected) training", 4 * 3 * (7 * (5 + 3) * 8 + 7 * 3 * 2) * 3),
        ("BlockLSTMGrad", 4 * 3 * 7 * (5 + 7) * 8 * 2),
        ("LSTMBlockCellGrad", 0),
    ],
)
def test_operations(task, expected):
    assert bench.operations(task, {"T": 4, "B": 3, "I": 5, "H": 7}) == expected


@pytest.mark.parametrize("task", candidates.DOES["blockcell"][0])
def test_tasks_run(task, monkeypatch):
    """With results of the sizes that are asked for; h of a projected LSTM has half of H."""
    monkeypatch.setattr("blockcell.set_num_threads", lambda threads: None)
    sizes = {"T": 3, "B": 2, "I": 5, "H": 6}
    result = candidates.blockcell(1)(task, "float32", sizes)()
    if "inference" in task:
        assert result[0].shape == (3, 2, 3 if "projected" in task else 6)


def cpu_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads CPU times of Linux")
@pytest.mark.skipif(machine.CPUS < 2, reason="needs a CPU for the neighbour")
@pytest.mark.parametrize("kind", machine.KINDS)
def test_a_neighbour_is_busy_while_it_is_awake(kind):
    """On the last CPU, which is left to it."""
    cpus = os.sched_getaffinity(0)
    with machine.open_neighbours([kind]) as neighbours:
        assert neighbours.keys() == {"quiet", kind} and os.sched_getaffinity(0) == cpus - {max(cpus)}
        process = neighbours[kind].process
        assert os.sched_getaffinity(process.pid) == {max(cpus)}
        asleep = cpu_seconds(process)
        pause = threading.Event().wait
        with neighbours["quiet"].awake():
            pause(0.1)
        assert cpu_seconds(process) == asleep
        with neighbours[kind].awake():
            for _ in range(6000):  # a minute at most
                if cpu_seconds(process) >= asleep + 0.1:
                    break
                pause(0.01)
        assert cpu_seconds(process) >= asleep + 0.1
    assert process.poll() is not None and os.sched_getaffinity(0) == cpus


def test_beside_a_neighbour_all_rounds_count():
    for beside, median in (("quiet", 1.0), ("reads", 2.0)):
        point = bench.Point("LSTM inference", "float32", SIZES, [1], beside)
        for seconds, mark in ((1.0, False), (1.0, False), (1.0, False), (3.0, True), (3.0, True), (3.0, True)):
            point.rounds.append(({("blockcell", 1): seconds}, mark))
        [row] = point.rows()
        assert (row["beside"], row["microseconds"], row["rounds"], row["marked"]) == (beside, median * 1e6, 6, 3)


# ------------------------------------------------------------------------------------------------------------ the files
def row(
    candidate, threads=1, H=16, ratio=1.0, low=None, high=None, us=100.0, rounds=5, marked=0, task="LSTM inference"
):
    sizes = SIZES | {"I": H, "H": H}
    spread = [ratio if value is None else value for value in (low, high)]
    line = [task, "float32", *sizes.values(), "quiet", candidate, threads, us, ratio, *spread, rounds, marked]
    return dict(zip(bench.COLUMNS, line, strict=True))


def test_short_means_three_of_four_rounds():
    assert bench.falls_short(row("torch", ratio=0.95, low=0.9, high=0.999))
    assert not bench.falls_short(row("torch", ratio=0.95, low=0.9, high=1.0))


POINTS = [  # with one and two threads, the first is short with two, the second with one
    *(row("blockcell", threads, H) for H in (16, 40) for threads in (1, 2)),
    *(row("torch", threads, H, ratio=1.5) for H in (16, 40) for threads in (1, 2)),
    row("onnxruntime", 1, 16, ratio=1.1),
    row("onnxruntime", 2, 16, ratio=0.8, low=0.7, high=0.9),
    row("onnxruntime", 1, 40, ratio=0.9),
    row("onnxruntime", 2, 40, ratio=0.99, low=0.9, high=1.02),
]


def test_again_measures_what_is_short():
    points = bench.short_points(POINTS, same_threads=True)
    assert sorted((point.sizes["H"], point.teams) for point in points) == [(16, [2]), (40, [1])]
    points = bench.short_points([r | {"beside": "reads"} for r in POINTS], same_threads=True)
    assert sorted((point.beside, point.sizes["H"], point.teams) for point in points) == [
        ("reads", 16, [2]),
        ("reads", 40, [1]),
    ]
    points = bench.short_points(POINTS, same_threads=False)
    assert sorted((point.sizes["H"], point.teams) for point in points) == [
        (16, bench.ONE_AND_ALL),
        (40, bench.ONE_AND_ALL),
    ]


def run_bench(monkeypatch, machine, about, ask, *arguments):
    """Run bench.py on a machine, with workers that answer as ``ask(worker, question)`` does; return the workers."""
    started = []

    class Candidate:
        missing, waited = None, 0.0

        def __init__(self, name, threads, **environment):
            self.name, self.threads, self.environment = name, threads, environment
            started.append(self)

        def ask(self, question):
            return ask(self, question)

        def close(self):
            pass

    monkeypatch.setattr(bench, "start_worker", Candidate)
    monkeypatch.setattr(turns, "watch", lambda workers: turns.Watch(workers, machine.rate))
    monkeypatch.setattr(bench, "describe_machine", lambda level, dtype, names: about)
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    bench.main()
    return started


def test_again_from_file_to_file(tmp_path, monkeypatch):
    """Only what is short is measured, with the file's level, in rounds that are repeated where they are marked."""
    about = {"cpu": "this", "level": "v3", "dtype": "float32", "date": "then", "same_threads": True}
    bench.write(tmp_path / "grid.csv", POINTS, about)
    asked, machine = [], Machine()

    def ask(worker, question):
        machine.shared = len(asked) < 3  # in the first round
        asked.append((question[2]["H"], worker.threads, worker.name, worker.environment["BLOCKCELL_LEVEL"]))
        return {"blockcell": 2e-6, "torch": 3e-6, "onnxruntime": 2.5e-6}[worker.name]

    now = about | {"date": "now"}
    run_bench(monkeypatch, machine, now, ask, "--again", str(tmp_path / "grid.csv"), "--rounds", "4")
    rows, new = bench.read(tmp_path / "grid.csv")
    assert new == about | {"again": "now"}
    names = ("blockcell", "torch", "onnxruntime")
    assert sorted(asked) == sorted(
        (*point, name, "v3") for point, rounds in (((16, 2), 5), ((40, 1), 4)) for name in names for _ in range(rounds)
    )
    for row in rows:
        point = row["H"], row["threads"]
        if point in ((16, 2), (40, 1)):
            ratio, more = {"blockcell": 1.0, "torch": 1.5, "onnxruntime": 1.25}[row["candidate"]], point == (16, 2)
            times = {"blockcell": 2.0, "torch": 3.0, "onnxruntime": 2.5}[row["candidate"]]
            assert figures(row)[2:] == [times, ratio, ratio, ratio, 4 + more, int(more)]
        else:
            assert row in POINTS
    assert len(rows) == len(POINTS)


def test_two_builds(tmp_path, monkeypatch):
    """Each in processes of blockcell with its own path, and no peers."""

    def ask(worker, question):
        return 3e-6 if worker.environment["PYTHONPATH"] == "old" else 2e-6

    about = {"cpu": "this", "level": "v3", "dtype": "float32"}
    sizes = ["--tasks", "LSTM training", "--widths", "16", "--batches", "4", "--steps", "20", "--threads", "2"]
    arguments = ["--builds", "old", "new", *sizes, "--csv", str(tmp_path / "builds.csv")]
    started = run_bench(monkeypatch, Machine(), about, ask, *arguments)
    workers = [(worker.name, worker.threads, worker.environment["PYTHONPATH"]) for worker in started]
    assert workers == [("blockcell", 2, "old"), ("blockcell", 2, "new")]
    rows, _ = bench.read(tmp_path / "builds.csv")
    assert [figures(row)[:4] for row in rows] == [["blockcell", 2, 2.0, 1.0], ["before", 2, 3.0, 1.5]]


def test_again_leaves_a_file_alone_where_nothing_is_short(tmp_path, monkeypatch):
    bench.write(tmp_path / "a.csv", [row("blockcell"), row("torch", ratio=1.1)], {"level": "v3", "dtype": "float32"})
    monkeypatch.setattr(sys, "argv", ["bench.py", "--again", str(tmp_path / "a.csv")])
    with pytest.raises(SystemExit, match="falls short"):
        bench.main()
    assert "again" not in bench.read(tmp_path / "a.csv")[1]


# ------------------------------------------------------------------------------------------------------------ the pages
def test_the_page_says_what_holds(tmp_path):
    about = {"cpu": "this", "level": "v3", "dtype": "float32", "date": "then", "threads": "2", "ceiling": 100.0}
    about |= {"compiler": "gcc", "numpy": "2", "torch": "2.14+cpu", "onnxruntime": "1.31", "same_threads": True}
    path, disturbed = tmp_path / "grid-v3.csv", row("onnxruntime", 2, 64, ratio=2.0, rounds=10, marked=8)
    bench.write(path, [*POINTS, disturbed], about)
    text = report.cpu_page([path])
    at = "T = 20, B = 4, I = 16, H = 16"
    for line in (
        f"| LSTM inference | PyTorch | 1 | 1.50x | 0 of 2 | 0 | 1.50x | {at} |",
        "| LSTM inference | onnxruntime | 1 | 0.99x | 1 of 2 | 0 | 0.90x | T = 20, B = 4, I = 40, H = 40 |",
        f"| LSTM inference | onnxruntime | 2 | 1.17x | 1 of 3 | 1 | 0.80x (0.70 to 0.90) | {at} |",
    ):
        assert line in text.splitlines()
    assert json.loads(path.with_suffix(".json").read_text()) == about


@pytest.mark.peers
def test_all_ways_over_episodes_compute_the_same(seed):
    """Results and gradients; with an episode at every step, at none, and at some."""
    torch = pytest.importorskip("torch")
    import blockcell.torch

    torch.manual_seed(seed)
    lstm, own, cell = torch.nn.LSTM(3, 5), blockcell.torch.LSTM(3, 5), torch.nn.LSTMCell(3, 5)
    own.load_state_dict(lstm.state_dict())
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in lstm.state_dict().items()})
    data, d_y = torch.randn(20, 4, 3), torch.randn(20, 4, 5)
    for share in (0.0, 0.2, 1.0):
        start, expected = torch.rand(20, 4) < share, None
        for way, call in torch_modules.WAYS.items():
            layer, x = {"cells": cell, "reset": own}.get(way, lstm), data.clone().requires_grad_()
            layer.zero_grad()
            y = call(layer, x, start)
            y.backward(d_y)
            results = [y.detach(), x.grad, *(weight.grad.clone() for weight in layer.parameters())]
            expected = expected or results
            for array, other in zip(results, expected, strict=True):
                bound = 1e-5 * max(1, other.abs().max().item())
                np.testing.assert_allclose(array, other, rtol=0, atol=bound, err_msg=way)


# ------------------------------------------------------------------------------------------------------------ the peers
@pytest.mark.parametrize("level", ["v3", "v4"])
def test_onnxruntime_is_limited_to_avx2(level, tmp_path, monkeypatch):
    """Where its library tests for AVX-512 and then for the registers, nowhere else."""
    other, tests = b"\xf7\xc7\x00\x00\x01\x00\x90" + bytes(20), b"\x41\xf7\xc2%b\x74\x05\xa8\xe0\x75"
    library = tmp_path / "onnxruntime" / "capi" / "onnxruntime_pybind11_state.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(other + 2 * (tests % b"\x00\x00\x01\x00"))
    spec = SimpleNamespace(origin=str(tmp_path / "onnxruntime" / "__init__.py"))
    monkeypatch.setattr(candidates.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("BLOCKCELL_LEVEL", level)
    monkeypatch.setattr(sys, "path", ["here"])
    with candidates.without_avx512():
        if level == "v3":
            copy = Path(sys.path[0], *library.parts[-3:])
            assert copy.read_bytes() == other + 2 * (tests % bytes(4))
        else:
            assert sys.path == ["here"]
    assert library.read_bytes() == other + 2 * (tests % b"\x00\x00\x01\x00") and sys.path == ["here"]
    library.write_bytes(other)
    if level == "v3":
        with pytest.raises(ImportError, match="cannot be limited"), candidates.without_avx512():
            pass
