"""`Scorer`: each result is that of a call with the sequence alone, in whatever batches; nothing is read too early."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise

import numpy as np
import pytest
from bits import bits, same
from cases import rng
from fresh import printed
from kernel_cases import DTYPES
from layer_cases import LAYERS
from scoring import alone, score_there
from traced import peak

import blockcell
from blockcell import GRU, LSTM, Bidirectional, Dense, Scorer, Stack, scorer

OUTPUTS = ["last", "all", "mean", "function"]


def sequences(g, layer, number, longest=40):
    lengths = g.integers(1, longest + 1, number)
    return [g.uniform(-1, 1, (length, layer.input_size)).astype(layer.dtype) for length in lengths]


def largest(y):
    """A function of one sequence, whose sums depend on how y lies in memory."""
    assert y.flags.c_contiguous and y.flags.owndata
    return y.max(axis=0), y.sum(dtype=np.float64)


def output_of(output):
    return largest if output == "function" else output


# ------------------------------------------------------------------------------------------------------------- the bits
@pytest.mark.meet(2)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_bits_of_one_at_a_time(name, dtype, output):
    """Of all layers, with lengths and a batch drawn at random, from a list and from a generator."""
    g = rng("scorer", name, dtype, output)
    layer = LAYERS[name](int(g.integers(1, 20)), int(g.integers(1, 40)), DTYPES[dtype])
    xs = sequences(g, layer, int(g.integers(1, 60)))
    score = Scorer(layer, output=output_of(output), batch=int(g.integers(1, 20)), num_threads=int(g.integers(1, 4)))
    expected = [alone(layer, output_of(output), x) for x in xs]
    results = score(xs)
    assert type(results) is list and same(results, expected)
    assert same(list(score(x for x in xs)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mean_is_one(dtype):
    """Beside the mean in float64, by the bound of a sum of t terms in float32, and of the rounding of the result."""
    g = rng("mean", dtype)
    layer = LAYERS["lstm"](3, 20, DTYPES[dtype])
    xs = sequences(g, layer, 30, 300)
    eps = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
    for x, mean in zip(xs, Scorer(layer, output="mean")(xs), strict=True):
        y = layer(x[:, None])[0][:, 0].astype(np.float64)
        assert mean.dtype == layer.dtype
        bound = len(x) * eps * np.abs(y).mean(axis=0) + np.finfo(layer.dtype).eps * np.abs(y.mean(axis=0))
        assert (np.abs(mean - y.mean(axis=0)) <= bound).all()


def test_a_mean_of_zeros():
    """Where y is a negative zero at each step: padding, which is zero, changes no bit."""
    y = np.array([[[-0.0], [-0.0]], [[-0.0], [0.0]]], np.float32)
    both, (first,) = scorer._mean_rows(y, np.array([2, 1])), scorer._mean_rows(y[:1, 1:], np.array([1]))
    assert same(both, np.zeros((2, 1), np.float32)) and same(both[1], first)


@pytest.mark.parametrize("last", [True, "ends"])
@pytest.mark.parametrize("output", ["last", "function"])
def test_dense_with_last(last, output):
    g = rng("last", last)
    layer = Stack(
        [Bidirectional(GRU.init(3, 5, seed=1), LSTM.init(3, 5, seed=2)), Dense.init(10, 4, seed=3, last=last)]
    )
    layer.set_weights(**{"1.b": g.standard_normal(4).astype(np.float32)})
    xs = sequences(g, layer, 30)
    xs[4] = xs[11] = np.zeros((0, 3), np.float32)  # of which y is that of the bias
    for some in (xs, [xs[4]], [xs[4]] * 9):
        expected = [alone(layer, output_of(output), x) for x in some]
        score = Scorer(layer, output=output_of(output), batch=7)
        assert same(score(some), expected) and same([*score(iter(some))], expected)
    results = Scorer(layer)([xs[4], [], np.empty(0, object)])
    np.testing.assert_array_equal(results, [layer.weights["1.b"]] * 3)
    for wrong in ("all", "mean"):
        with pytest.raises(ValueError, match=f"Scorer: output is '{wrong}'; expected 'last' or a function"):
            Scorer(layer, output=wrong)


# ---------------------------------------------------------------------------------------------------------- the batches
def test_batches():
    """Each sequence once, as many together as may be, the longest first, and never more padding than steps."""
    g = rng("batches")
    for most in (1, 2, 7, 64):
        for spread in (1, 5, 400, 100_000):
            lengths = [int(n) for n in np.exp(g.uniform(0, np.log(spread + 1), 500)).astype(int).clip(1)]
            batches = list(scorer._plan_batches(lengths, most))
            assert sorted(k for batch in batches for k in batch) == list(range(500))
            flat = [lengths[k] for batch in batches for k in batch]
            assert flat == sorted(lengths, reverse=True)
            for batch in batches:
                assert 1 <= len(batch) <= most
                assert lengths[batch[0]] * len(batch) <= 2 * sum(lengths[k] for k in batch)
            for batch, after in pairwise(batches):  # a batch ends only where it must
                more = sum(lengths[k] for k in [*batch, after[0]])
                assert len(batch) == most or lengths[batch[0]] * (len(batch) + 1) > 2 * more


@pytest.mark.parametrize("window", [None, 32 * 64])
def test_little_is_padding(window):
    """Of n batches of lengths drawn evenly, each has an n-th of the range, and pads half of that on average."""
    lengths = rng("padding").integers(20, 401, 20_000).tolist()
    padded = 0
    for first in range(0, len(lengths), window or len(lengths)):
        some = lengths[first : first + (window or len(lengths))]
        padded += sum(len(batch) * some[batch[0]] for batch in scorer._plan_batches(some, 64))
    batches = (window or len(lengths)) / 64
    assert padded / sum(lengths) - 1 < 1.1 * (400 - 20) / 2 / batches / 210


# -------------------------------------------------------------------------------------------------------- what it takes
def test_kinds_of_sequences():
    """What has a length gives a list, anything else an iterator."""
    layer = GRU.init(2, 3, seed=1)
    xs, score = sequences(rng("kinds"), layer, 9), Scorer(layer, batch=2)
    expected = [alone(layer, "last", x) for x in xs]
    objects = np.empty(len(xs), object)
    objects[:] = xs
    for kind in (xs, tuple(xs), objects):
        assert type(score(kind)) is list and same(score(kind), expected)
    for kind in (iter(xs), map(np.asarray, xs), dict(enumerate(xs)).values()):
        results = score(kind)
        assert not isinstance(results, list) and same(list(results), expected)
    assert score([]) == [] and list(score(iter([]))) == []
    assert same(score(np.stack([xs[0], xs[0]])), [expected[0]] * 2)
    lists = [x.tolist() for x in xs]  # converted to the layer's dtype
    nested = [np.array([*map(np.array, x)], object) for x in lists]
    for x, rows in zip(nested, lists, strict=True):  # as pandas has them
        for k, row in enumerate(rows):
            x[k] = np.array(row)
    strange = [np.asfortranarray(x).astype(">f4") for x in xs]
    for kind in (lists, nested, strange):
        assert same(score(kind), expected) and same(list(score(iter(kind))), expected)


def columns(pyarrow, xs, size):
    """The sequences as columns of Arrow's of all kinds, some of them parts of larger ones, with nulls elsewhere."""
    number = pyarrow.float32()
    rows = [[[0.0] * size] * 3, None, *[x.tolist() for x in xs], [[1.0] * size, None]]
    for inner in (pyarrow.list_(number), pyarrow.large_list(number), pyarrow.list_(number, size)):
        for outer in (pyarrow.list_(inner), pyarrow.large_list(inner)):
            whole = pyarrow.array(rows, outer)
            yield whole[2:-1]
            yield pyarrow.chunked_array([whole[2:5], whole[5:5], whole[5:-1]])
    same_length = [x[:1].tolist() for x in xs]
    yield pyarrow.array(same_length, pyarrow.list_(pyarrow.list_(number), 1))


@pytest.mark.parametrize("size", [1, 3])
def test_columns_of_arrow(size):
    pyarrow = pytest.importorskip("pyarrow")
    layer = GRU.init(size, 3, seed=1)
    xs, score = sequences(rng("arrow"), layer, 9), Scorer(layer, batch=2)
    *all_kinds, same_length = columns(pyarrow, xs, size)
    for column in all_kinds:
        assert same(score(column), [alone(layer, "last", x) for x in xs]), column.type
    assert same(score(same_length), [alone(layer, "last", x[:1]) for x in xs])
    assert score(pyarrow.array([], same_length.type)) == [] and score(pyarrow.chunked_array([], same_length.type)) == []
    if size == 1:
        flat = pyarrow.array([x[:, 0].tolist() for x in xs], pyarrow.list_(pyarrow.float32()))
        assert same(score(flat[1:]), [alone(layer, "last", x) for x in xs[1:]])


def test_a_column_is_not_copied():
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array([[[1.0, 2.0]] * 1000] * 100, pyarrow.list_(pyarrow.list_(pyarrow.float32())))
    start, end = column.values.values.buffers()[1].address, column.values.values.buffers()[1].size
    for view in scorer._read_column(column, 2, pyarrow):
        assert start <= view.__array_interface__["data"][0] < start + end


@pytest.mark.parametrize(
    ("rows", "kind", "error", "message"),
    [
        ([[1.0], [2.0]], "list<float>", TypeError, "a column of list<.*float>; expected lists of lists of numbers"),
        ([1.0], "float", TypeError, "a column of float; expected lists of lists of numbers"),
        ([[[1.0, 2.0]], [[1.0, 2.0], [3.0]]], "list<list<float>>", ValueError, "sequences has a step .* not of 2"),
        ([[[1.0, 2.0]], None], "list<list<float>>", ValueError, "sequences has a null"),
        ([[[1.0, 2.0]], [[1.0, 2.0], None]], "list<list<float>>", ValueError, "sequences has a null"),
        ([[[1.0, 2.0]] * 2, [[1.0, None]]], "list<list<float>>", ValueError, "sequences has a null"),
        ([[[1.0, 2.0]], []], "list<list<float>>", ValueError, r"sequences\[1\] has no steps"),
        ([[[1.0, 2.0]]], "list<list<double>>", TypeError, r"sequences\[0\] has dtype float64; expected float32"),
    ],
)
def test_columns_that_are_refused(rows, kind, error, message):
    pyarrow = pytest.importorskip("pyarrow")
    value = pyarrow.float64() if "double" in kind else pyarrow.float32()
    for _ in range(kind.count("list")):
        value = pyarrow.list_(value)
    score = Scorer(GRU.init(2, 3, seed=1))
    with pytest.raises(error, match=message):
        score(pyarrow.array(rows, value))
    if error is ValueError:  # in a second chunk, too
        with pytest.raises(error, match=message):
            score(pyarrow.chunked_array([pyarrow.array(rows[:1], value), pyarrow.array(rows[1:], value)]))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.zeros((0, 3), np.float32), ValueError, "has no steps; expected at least one"),
        ([], ValueError, "has no steps; expected at least one"),
        (np.zeros(0, np.float32), ValueError, r"has shape \(0,\); expected \(t, I\) with I=3 from the layer"),
        (np.zeros((4, 2), np.float32), ValueError, r"has shape \(4, 2\); expected \(t, I\) with I=3 from the layer"),
        (np.zeros((4, 1, 3), np.float32), ValueError, r"has shape \(4, 1, 3\); expected \(t, I\)"),
        (np.zeros((4, 3)), TypeError, r"has dtype float64; .* of the layer; sequences\[\d+\].astype\(np.float32\) "),
        (np.zeros((4, 3), int), TypeError, "has dtype int64; expected float32, that of the layer; seq"),
        ([["a", "b", "c"]], TypeError, "is made of <U1; expected an array of real numbers"),
        ([[1, 2, 3], [4, 5]], ValueError, "cannot be read as an array"),
        (None, TypeError, "is None; expected an array of real numbers"),
        (np.ma.masked_equal(np.ones((2, 3), np.float32), 1), TypeError, "has masked entries"),
    ],
)
def test_sequences_that_are_refused(value, error, message):
    """By their number, of a list before anything is computed."""
    layer, called = GRU.init(3, 2, seed=1), []
    good = np.ones((2, 3), np.float32)
    score = Scorer(layer, output=called.append, batch=2)
    with pytest.raises(error, match=rf"^Scorer: sequences\[5\] {message}"):
        score([good] * 5 + [value])
    assert not called
    with pytest.raises(error, match=rf"^Scorer: sequences\[70\] {message}"):
        list(score(iter([good] * 70 + [value])))
    assert len(called) == 64  # those of the first window


@pytest.mark.parametrize("value", [None, 3, "text", {"x": []}, np.array(1.0)])
def test_no_sequences(value):
    with pytest.raises(TypeError, match=r"Scorer: sequences is .*; expected a list, or another iterable, of arrays"):
        Scorer(GRU.init(3, 2, seed=1))(value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output": "first"}, ValueError, "output is 'first'; expected 'last', 'all', 'mean' or a function"),
        ({"output": None}, TypeError, "output is None; expected 'last', 'all', 'mean' or a function"),
        ({"batch": 0}, ValueError, "batch is 0; expected at least 1"),
        ({"batch": 2.0}, TypeError, "batch is 2.0; expected an integer"),
        ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
        ({"num_threads": "all"}, TypeError, "num_threads must be an integer or None, got 'all'"),
        ({"path_or_layer": 3}, TypeError, "path_or_layer is 3; expected a path or a layer, quantized or not"),
    ],
)
def test_arguments_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"^Scorer: {message}"):
        Scorer(**{"path_or_layer": GRU.init(3, 2, seed=1)} | arguments)


def test_errors_of_a_function_name_the_sequence():
    def refuses(y):
        if len(y) == 7:
            raise RuntimeError("seven")

    xs = [np.ones((7 if k == 33 else 3, 2), np.float32) for k in range(40)]
    score = Scorer(GRU.init(2, 3, seed=1), output=refuses, batch=1)
    for call in (lambda: score(xs), lambda: list(score(iter(xs)))):
        with pytest.raises(RuntimeError, match="seven") as caught:
            call()
        assert caught.value.__notes__ == ["Scorer: output was called with y of sequences[33]"]


# ------------------------------------------------------------------------------------------------------------ iterators
def test_nothing_is_read_too_early(monkeypatch):
    layer, read = GRU.init(2, 3, seed=1), []

    def endless():
        for k in count():
            read.append(k)
            yield np.full((1 + k % 5, 2), k, np.float32)

    score = Scorer(layer, batch=4)
    results = score(endless())
    assert not read
    first = list(islice(results, 300))
    assert len(read) == 3 * 32 * 4
    assert same(first, score(list(islice(endless(), 300))))
    monkeypatch.setattr(scorer, "ENOUGH", 5 * 5 * 10)  # numbers: of about 3 steps of 5 numbers, 17 sequences
    read.clear()
    next(score(endless()))
    assert 10 <= len(read) <= 25
    monkeypatch.setattr(scorer, "ENOUGH", 0)
    read.clear()
    next(score(endless()))
    assert len(read) == 4  # a batch in any case


def test_the_memory_of_an_iterator_is_bounded():
    """A hundred times as many sequences take no more."""
    score = Scorer(GRU.init(8, 8, seed=1), batch=4)
    x = np.ones((25, 8), np.float32)

    def number_of(n):
        return sum(1 for _ in score(x for _ in range(n)))

    number_of(300)
    (few, least), (many, most) = peak(lambda: number_of(300)), peak(lambda: number_of(30_000))
    assert (few, many) == (300, 30_000) and most < 1.5 * least


def test_results_are_arrays_of_their_own():
    """Whoever keeps one does not keep the batch."""
    xs = [np.ones((t, 2), np.float32) for t in range(1, 9)]
    for output in ("last", "all", "mean"):
        for result in Scorer(GRU.init(2, 3, seed=1), output=output)(xs):
            assert result.flags.owndata and result.flags.writeable and result.flags.c_contiguous


# ------------------------------------------------------------------------------------------------------ other processes
@pytest.fixture
def saved(tmp_path):
    layer = Stack([LSTM.init(3, 20, seed=1), Dense.init(20, 4, seed=2)])
    path = tmp_path / "layer.npz"
    layer.save(path)
    return layer, path


def loads(monkeypatch):
    """The paths that are loaded from now on."""
    paths, load = [], scorer.read_any
    scorer._read_file.cache_clear()
    monkeypatch.setattr(scorer, "read_any", lambda path: paths.append(path) or load(path))
    return paths


def test_a_file_is_loaded_once(saved, monkeypatch):
    layer, path = saved
    paths, xs = loads(monkeypatch), sequences(rng("once"), layer, 9)
    expected = Scorer(layer)(xs)
    score = Scorer(path)
    text = pickle.dumps(score)
    assert len(text) < 1000 < len(pickle.dumps(Scorer(layer)))
    for again in (score, Scorer(str(path)), *(pickle.loads(text) for _ in range(3))):
        assert same(again(xs), expected)
    assert paths == [str(path)]
    scorer._read_file.cache_clear()  # as in another process
    late = [pickle.loads(text) for _ in range(8)]
    assert len(paths) == 1
    with ThreadPoolExecutor(8) as pool:
        assert all(same(results, expected) for results in pool.map(lambda scorer_of_thread: scorer_of_thread(xs), late))
    assert len(paths) == 2


def test_a_file_that_was_replaced(saved, monkeypatch):
    layer, path = saved
    score, xs = Scorer(path), sequences(rng("replaced"), layer, 9)
    expected, text = score(xs), pickle.dumps(score)
    layer.set_weights(**{"1.b": np.ones(4, np.float32)})
    layer.save(path)
    assert (
        same(score(xs), expected) and same(Scorer(path)(xs), Scorer(layer)(xs)) and not same(Scorer(path)(xs), expected)
    )
    with pytest.raises(ValueError, match=r"^Scorer: .*layer.npz holds another layer than when this scorer was made"):
        pickle.loads(text)(xs)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"layer\.npz"):
        pickle.loads(text)(xs)
    with pytest.raises(FileNotFoundError, match=r"layer\.npz"):
        Scorer(path)


def test_a_relative_path_is_that_of_the_moment(saved, monkeypatch):
    _, path = saved
    monkeypatch.chdir(path.parent)
    score = Scorer(path.name)
    monkeypatch.chdir("/")
    scorer._read_file.cache_clear()
    assert pickle.loads(pickle.dumps(score))([np.ones((3, 3), np.float32)])[0].shape == (4,)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.parametrize("made_of", ["path", "layer"])
def test_processes(method, made_of, saved):
    """Each loads a file that it has not loaded yet, once."""
    layer, path = saved
    xs = sequences(rng("processes"), layer, 40)
    expected = bits(Scorer(layer)(xs))
    score = Scorer(path if made_of == "path" else layer)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        results = pool.starmap(score_there, [(score, xs)] * 12, chunksize=1)
    assert all(result == expected and same_number for result, _, same_number, _ in results)
    processes = {process for *_, process in results}
    loaded = sum(n for _, n, _, _ in results)
    assert loaded == (len(processes) if made_of == "path" and method != "fork" else 0)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_fork_while_a_file_is_read(saved):
    """By another thread, which does not exist in the child."""
    _, path = saved
    text = pickle.dumps(Scorer(path))
    scorer._read_file.cache_clear()
    with scorer._reading:
        child = os.fork()
        if child == 0:
            os._exit(0 if len(pickle.loads(text)([np.ones((3, 3), np.float32)])) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -------------------------------------------------------------------------------------------------------------- threads
def test_the_setting_of_the_process_stays():
    """Neither read, unless num_threads is None, nor changed; here a thread that was started is seen."""
    code = """
import os
import numpy as np
import blockcell

layer, xs = blockcell.LSTM.init(64, 128, seed=1), [np.ones((50, 64), np.float32)] * 64
def running():
    return len(os.listdir("/proc/self/task"))
blockcell.set_num_threads({process})
before = running()
blockcell.Scorer(layer{option})(xs)
print(running() > before, blockcell.get_num_threads())
"""
    if not os.path.isdir("/proc/self/task") or not blockcell.build_info()["openmp"]:
        pytest.skip("threads cannot be counted, or there are none")
    for process, option, more in [(2, "", False), (1, ", num_threads=2", True), (2, ", num_threads=None", True)]:
        assert printed(code.format(process=process, option=option)) == f"{more} {process}"


def test_repr(saved):
    layer, path = saved
    assert repr(Scorer(path, batch=3)) == f"Scorer({str(path)!r}, output='last', batch=3, num_threads=1)"
    assert repr(Scorer(layer, output="all", num_threads=None)).endswith("output='all', batch=64, num_threads=None)")
