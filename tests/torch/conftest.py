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


@pytest.fixture
def new_memory_holds_nan():
    """Let PyTorch fill the memory of its new tensors with NaN, until something is written to it."""
    torch = pytest.importorskip("torch")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def new_memory_holds_zeros(monkeypatch):
    """Let what no kernel writes be the same in each call: a tape has memory for finished rows."""
    pytest.importorskip("torch")
    from blockcell.torch.op import _Plan

    allocate = _Plan.allocate
    monkeypatch.setattr(_Plan, "allocate", lambda *args: [tensor.zero_() for tensor in allocate(*args)])
