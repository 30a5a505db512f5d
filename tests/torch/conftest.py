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
