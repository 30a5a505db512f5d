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


def fill_outputs(monkeypatch, value):
    """Write a value to the memory of a pass' outputs before the kernel runs: a tape has memory for finished rows."""
    from blockcell.torch.op import _Plan

    allocate = _Plan.allocate
    monkeypatch.setattr(_Plan, "allocate", lambda *args: [tensor.fill_(value) for tensor in allocate(*args)])


@pytest.fixture
def new_memory_holds_nan(monkeypatch):
    """Let memory that nobody has written be NaN."""
    torch = pytest.importorskip("torch")
    fill_outputs(monkeypatch, float("nan"))
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def new_memory_holds_zeros(monkeypatch):
    """Let a pass' outputs be the same in each call, also where no kernel writes."""
    pytest.importorskip("torch")
    fill_outputs(monkeypatch, 0)
