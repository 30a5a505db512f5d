"""TorchRL's LSTMModule and GRUModule after `replace`, beside the same modules before it.

`pytest -m peers`, with torch and torchrl in .venv.
"""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
from peer_cases import BOUNDS, check_configurations, worst_of
from torch_cases import MARKS

torch = pytest.importorskip("torch")
nn = pytest.importorskip("blockcell.torch")
modules = pytest.importorskip("torchrl.modules")
objectives = pytest.importorskip("torchrl.objectives")
tensordict_nn = pytest.importorskip("tensordict.nn")
tensordict = pytest.importorskip("tensordict")

pytestmark = MARKS
KINDS = ["LSTM", "GRU"]


def make_module(kind, inputs, hidden, **options):
    """Make TorchRL's module of a kind."""
    states = ["h", "c"][: 1 + (kind == "LSTM")]
    keys = {"in_keys": ["x", *states], "out_keys": ["y", *[("next", state) for state in states]]}
    return getattr(modules, f"{kind}Module")(inputs, hidden, **keys, **options)


def replaced(module):
    """Return a copy with blockcell's layer."""
    module = copy.deepcopy(module)
    nn.replace(module)
    return module


def draw_rollout(g, module, batch, dtype, share=0.2):
    """Draw a tensordict with inputs, starts of trajectories and stored states; x and the states require gradients."""
    layer = module.lstm if hasattr(module, "lstm") else module.gru
    cells = layer.num_layers * (1 + layer.bidirectional)
    widths = {"h": layer.proj_size or layer.hidden_size, "c": layer.hidden_size}
    values = {"is_init": torch.from_numpy(g.random((*batch, 1)) < share)}
    for key in module.in_keys[:-1]:
        shape = (layer.input_size,) if key == "x" else (cells, widths[key])
        values[key] = torch.from_numpy(g.uniform(-1, 1, (*batch, *shape)).astype(dtype)).requires_grad_()
    return tensordict.TensorDict(values, batch)


def training_step(module, rollout, seed=0):
    """Compute the recurrent mode; return results and gradients by name."""
    module.zero_grad()
    leaves = {key: value.detach().clone().requires_grad_(value.requires_grad) for key, value in rollout.items()}
    torch.manual_seed(seed)
    with modules.set_recurrent_mode(True):
        result = module(tensordict.TensorDict(leaves, rollout.batch_size))
    outputs = {str(key): result[key] for key in module.out_keys}
    torch.autograd.backward([*outputs.values()], [torch.cos(a.detach()) for a in outputs.values()])
    grads = {f"d_{key}": leaf.grad for key, leaf in leaves.items() if leaf.requires_grad}
    grads |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: value.detach() for name, value in (outputs | grads).items() if value is not None}


def assert_all_close(results, expected):
    for value, other in zip(results, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)


def assert_close(module, expected_module, rollout):
    """Assert that both modules give the same results and gradients."""
    results, expected = training_step(module, rollout), training_step(expected_module, rollout)
    assert results.keys() == expected.keys()
    assert_all_close(results.values(), expected.values())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_random_configurations(kind, dtype, seed):
    """Results in recurrent mode and all gradients, of float64 modules of TorchRL's."""

    def compare(g, k):
        fewest = 1 if dtype == "float64" else 8
        batch = *(int(size) for size in g.integers(1, 6, g.integers(0, 3))), int(g.integers(1, 20))
        inputs, hidden = (int(size) for size in g.integers(fewest, (24, 40)))
        options = {name: bool(g.integers(2)) for name in ("bidirectional", "bias")}
        options["num_layers"] = int(g.integers(1, 4))
        if options["num_layers"] > 1 and dtype == "float64":  # the same numbers are drawn
            options["dropout"] = float(g.choice([0.0, 0.3]))
        if kind == "LSTM" and hidden > fewest and g.integers(2):
            options["proj_size"] = int(g.integers(fewest, hidden))
        torch.manual_seed(k)
        theirs = make_module(kind, inputs, hidden, **options)
        ours = replaced(theirs).to(getattr(torch, dtype))
        rollout = draw_rollout(g, theirs, batch, dtype, g.choice([0.0, 0.1, 0.5, 1.0]))
        if g.random() < 0.2:
            rollout = rollout.select("x", "is_init")
        where = f"{kind}, {dtype}, {batch=}, {inputs=}, {hidden=}, {options}, {[*rollout.keys()]}"
        doubled = rollout.apply(
            lambda value: value.detach().double().requires_grad_() if value.requires_grad else value
        )
        results, expected = training_step(ours, rollout), training_step(theirs.double(), doubled)
        assert results.keys() == expected.keys(), where
        pairs = {name: (value.numpy(), expected[name].numpy()) for name, value in results.items()}
        error, name = worst_of(pairs, dtype)
        return error, f"{name} of {where}"

    check_configurations(compare, BOUNDS[dtype], seed)


@pytest.mark.parametrize("batch", [(5,), (0, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_forms_of_calls(kind, batch, seed):
    """Tensors by position, stacks of tensordicts, single steps, no rows: the numbers of TorchRL's module."""
    theirs = make_module(kind, 8, 10)
    ours = replaced(theirs)
    rollout = draw_rollout(np.random.default_rng(seed), theirs, batch, "float32").detach()
    with torch.no_grad(), modules.set_recurrent_mode(True):
        expected = [theirs(rollout.clone())[key] for key in theirs.out_keys]
        assert_all_close(ours(*[rollout[key] for key in ours.in_keys]), expected)
        if 0 in batch:
            return
        stack = tensordict.LazyStackedTensorDict.lazy_stack([*rollout.clone().unbind(-1)], len(batch) - 1)
        assert_all_close([ours(stack)[key] for key in ours.out_keys], expected)
    with torch.no_grad():
        expected = [theirs(rollout.clone())[key] for key in theirs.out_keys]
        assert_all_close([ours(rollout.clone())[key] for key in ours.out_keys], expected)


@pytest.mark.parametrize("way", ["copied", "pickled", "python", "cudnn", "restored", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_other_layers(kind, way, seed):
    theirs = make_module(kind, 8, 10, num_layers=2)
    ours = replaced(theirs)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    change = {
        "copied": copy.deepcopy,
        "pickled": lambda module: pickle.loads(pickle.dumps(module)),
        "python": lambda module: module.make_python_based(),
        "cudnn": lambda module: module.make_cudnn_based(),
        "restored": lambda module: (nn.restore(module), module)[1],
        "twice": replaced,
    }[way]
    module = change(ours)
    rollout = draw_rollout(np.random.default_rng(seed), theirs, (3, 9), "float32")
    assert_close(module, theirs, rollout)
    nn.restore(module)
    assert type(module) is type(theirs) and not isinstance(getattr(module, kind.lower()), getattr(nn, kind))
    assert_close(module, theirs, rollout)


@pytest.mark.parametrize("kind", KINDS)
def test_report(kind):
    class Derived(getattr(modules, f"{kind}Module")):
        pass

    module = make_module(kind, 8, 10)
    model = torch.nn.ModuleDict({"policy": module, "own": Derived(8, 10, in_key="x", out_key="y")})
    reason = f"Derived is derived from {kind}Module, and may compute something else"
    name, layer = kind.lower(), f"{kind}(8, 10, batch_first=True)"
    for changed in ({f"policy.{name}": layer, "policy": f"blockcell.torch.torchrl.{kind}Module"}, {}):
        report = nn.replace(model)
        left = {f"own.{name}": reason} | ({} if changed else {f"policy.{name}": "it is one already"})
        assert (report.changed, report.left) == (changed, left)
    assert "lstm=LSTM(" in repr(module) or "gru=GRU(" in repr(module)
    theirs = f"torchrl.modules.tensordict_module.rnn.{kind}Module"
    assert nn.restore(model).changed == {f"policy.{name}": layer, "policy": theirs}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, where its graphs break
@pytest.mark.parametrize("backend", ["pad", "auto", "scan"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_scans(kind, backend, dynamo, seed):
    theirs = make_module(kind, 8, 10, recurrent_backend=backend)
    ours = replaced(theirs)
    rollout = draw_rollout(np.random.default_rng(seed), theirs, (3, 5), "float32")
    assert_close(ours, theirs, rollout)
    results, expected = training_step(torch.compile(ours, backend="eager"), rollout), training_step(theirs, rollout)
    assert_all_close(results.values(), expected.values())


@pytest.mark.parametrize("kind", KINDS)
def test_losses(kind, seed):
    """Gradients of PPO and DQN, whose losses put parameters into copies of the networks."""
    rollout = draw_rollout(np.random.default_rng(seed), make_module(kind, 8, 10), (3, 9), "float32").detach()
    next_rollout = rollout.apply(lambda value: torch.cat([value[:, 1:], value[:, -1:]], 1))
    rollout["next"] = next_rollout.update(
        {
            "reward": torch.randn(3, 9, 1),
            "done": next_rollout["is_init"],
            "terminated": next_rollout["is_init"],
        }
    )
    rollout["action"] = torch.nn.functional.one_hot(torch.randint(2, (3, 9)), 2)
    rollout["action_log_prob"] = torch.full((3, 9), -0.7)
    results = []
    for replaces in (False, True):
        torch.manual_seed(seed)

        def head(size, key):
            return tensordict_nn.TensorDictModule(torch.nn.Linear(10, size), ["y"], [key])

        actor, critic, q = (
            tensordict_nn.TensorDictSequential(make_module(kind, 8, 10), head(size, key))
            for size, key in ((2, "logits"), (1, "state_value"), (2, "action_value"))
        )
        for model in (actor, critic, q) if replaces else ():
            nn.replace(model)
        distribution = {"in_keys": ["logits"], "out_keys": ["action"], "distribution_class": modules.OneHotCategorical}
        actor = modules.ProbabilisticActor(actor, **distribution, return_log_prob=True)
        ppo = objectives.ClipPPOLoss(actor, critic)
        q = tensordict_nn.TensorDictSequential(*q, modules.QValueModule(action_space="one-hot"))
        dqn = objectives.DQNLoss(q, action_space="one-hot", delay_value=True)
        dqn.make_value_estimator(gamma=0.9)
        objectives.SoftUpdate(dqn, eps=0.9)
        with modules.set_recurrent_mode(True):
            data = objectives.value.GAE(gamma=0.9, lmbda=0.9, value_network=critic, shifted=True)(rollout.clone())
            losses = ppo(data)
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            dqn(rollout.clone())["loss"].backward()
        results.append(
            [parameter.grad for loss in (ppo, dqn) for parameter in loss.parameters() if parameter.requires_grad]
        )
    assert len(results[0]) == 18
    assert_all_close(*results)


@pytest.mark.parametrize("scheme", ["int8", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized(kind, scheme, seed):
    theirs = make_module(kind, 16, 64).eval()
    ours = copy.deepcopy(theirs)
    nn.replace(ours, quantize=scheme)
    rollout = draw_rollout(np.random.default_rng(seed), theirs, (3, 9), "float32").detach()
    with torch.no_grad(), modules.set_recurrent_mode(True):
        y, expected = ours(rollout.clone())["y"], theirs(rollout.clone())["y"]
    assert 0 < (y - expected).abs().max() < 0.05


def test_one_state_alone_is_refused(seed):
    module = replaced(make_module("LSTM", 8, 10))
    rollout = draw_rollout(np.random.default_rng(seed), module, (3, 9), "float32").exclude("c")
    message = "blockcell.torch.LSTM: hx is of type Tensor; expected a pair of tensors (h_0, c_0)"
    with modules.set_recurrent_mode(True), pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        module(rollout)
