import itertools

import pytest


@pytest.fixture
def dynamo():
    """Forget what was compiled before and in the test."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def threads_of_torch_as_before():
    """Restore the number of threads of PyTorch after the test."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def fill_outputs(monkeypatch, values):
    """Write the next of the values to the memory of each output of a pass before the kernel runs."""
    from blockcell.torch.op import _Plan

    allocate = _Plan.allocate
    monkeypatch.setattr(_Plan, "allocate", lambda *args: [tensor.fill_(next(values)) for tensor in allocate(*args)])


@pytest.fixture
def new_memory_holds_nan(monkeypatch):
    """Let memory that nobody has written be NaN."""
    torch = pytest.importorskip("torch")
    fill_outputs(monkeypatch, itertools.repeat(float("nan")))
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def new_memory_differs(monkeypatch):
    """Let a pass' outputs hold another number in each call where no kernel writes."""
    pytest.importorskip("torch")
    fill_outputs(monkeypatch, itertools.count(1.0))
