"""from_torch runs the module that it gets: what it proves, what it refuses, what it says, and what it leaves alone.

`pytest -m peers`, with torch in .venv.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import warnings
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from convert_cases import assert_same  # noqa: E402
from torch import nn  # noqa: E402
from torch_cases import MARKS  # noqa: E402

import blockcell.torch  # noqa: E402
from blockcell import convert  # noqa: E402
from blockcell.convert import ConversionError  # noqa: E402
from blockcell.convert import torch as converter  # noqa: E402

pytestmark = MARKS


@pytest.fixture(autouse=True)
def one_thread(seed):
    """Draw weights by the seed, and let small calls of PyTorch not wait for threads of a busy machine."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def converted(model, **options):
    """Return what from_torch gives, or its error, and the text of its warning, of which there is one at most."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            result = convert.from_torch(model, **options)
        except ConversionError as error:
            result = error
    assert [warning.filename for warning in record] in ([], [__file__])
    return result, str(record[0].message) if record else ""


class Model(nn.Module):
    """An LSTM, and perhaps other modules, in a forward that is a function of the model and x."""

    def __init__(self, function, rnn=None, **members):
        super().__init__()
        self.function, self.rnn = function, rnn or nn.LSTM(4, 4)
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


# ------------------------------------------------------------------------------------------------------ random modules
OPERATIONS = {  # of x, whose axis t is time; those of the first line give x
    "none": lambda x, t: x,
    "clone": lambda x, t: x.clone(),
    "two flips": lambda x, t: x.flip(t).flip(t),
    "flip": lambda x, t: x.flip(t),
    "flip rows": lambda x, t: x.flip(1 - t),
    "flip columns": lambda x, t: x.flip(2),
    "scale": lambda x, t: 1.5 * x,
    "shift": lambda x, t: x + 0.1,
    "relu": lambda x, t: x.relu(),
    "roll": lambda x, t: x.roll(1, t),
    "cumsum": lambda x, t: x.cumsum(t),
    "every second": lambda x, t: x[::2] if t == 0 else x[:, ::2],
    "first three": lambda x, t: x.narrow(t, 0, 3),
    "round": lambda x, t: x.bfloat16().to(x.dtype),
    "mean": lambda x, t: x - x.mean(t, keepdim=True),
}
IDENTITIES = [*OPERATIONS][:3]
FRONTS = *[None] * 8, "Embedding", "Linear", "Conv1d", "ReLU"
RETURNS = *["y", "tuple", "dict"] * 3, "last step", "state"


class Drawn(nn.Module):
    """A random module, with what was drawn for it as `draws`."""

    def __init__(self, g):
        super().__init__()
        self.draws = draws = {
            name: options[g.integers(len(options))]
            for name, options in {
                "kind": ["LSTM", "GRU", "RNN", "LSTM", "GRU", "LSTMCell", "GRUCell", "two", "twice"],
                "front": FRONTS,
                "before": IDENTITIES * 16 + [*OPERATIONS],
                "behind": IDENTITIES * 16 + [*OPERATIONS],
                "residual": [False] * 7 + [True],
                "head": [False] * 4 + [True],
                "end": IDENTITIES * 16 + [*OPERATIONS],
                "returns": RETURNS,
                "transposed": [False, False, True],
            }.items()
        }
        self.time_axis = int(g.integers(2))
        I, H = int(g.integers(3, 7)), int(g.integers(2, 7))  # noqa: E741
        options = {"num_layers": int(g.integers(1, 3)), "bidirectional": bool(g.integers(2))}
        directions, kind = 1 + options["bidirectional"], draws["kind"]
        if draws["residual"] and not kind.endswith("Cell"):
            options["bidirectional"], directions, H = False, 1, I
        if kind == "twice":
            options["bidirectional"], directions, I = False, 1, H  # noqa: E741
        if kind.endswith("Cell"):
            self.time_axis, directions, draws["transposed"] = 0, 1, False
            H = I if draws["residual"] else H
            self.rnn = getattr(nn, kind)(I, H)
        else:
            rnn = getattr(nn, {"two": "GRU", "twice": "LSTM"}.get(kind, kind))
            self.rnn = rnn(I, H, batch_first=bool(self.time_axis), dropout=0.5 * (options["num_layers"] > 1), **options)
        if kind == "two":
            self.upper = nn.LSTM(directions * H, H, batch_first=bool(self.time_axis))
            directions = 1
        fronts = {"Embedding": lambda: nn.Embedding(9, I, padding_idx=0), "Linear": lambda: nn.Linear(I + 1, I)}
        fronts |= {"Conv1d": lambda: nn.Conv1d(I + 1, I, 3, padding=1), "ReLU": nn.ReLU, None: lambda: None}
        self.front, self.drop = fronts[draws["front"]](), nn.Dropout(0.3)
        self.head = nn.Linear(directions * H, 2) if draws["head"] else None
        self.train(bool(g.integers(2)))

    def draw_input(self, g, T, B):
        """Draw an input of B sequences of T steps."""
        size = self.rnn.input_size + (self.draws["front"] in ("Linear", "Conv1d"))
        shape = [B, T] if self.axis_of_input() else [T, B]
        if self.draws["front"] == "Embedding":
            return torch.from_numpy(g.integers(0, 9, shape))
        return torch.from_numpy(g.standard_normal([*shape, size]).astype(np.float32))

    def axis_of_input(self):
        """Return the axis of time in the input."""
        return 1 - self.time_axis if self.draws["transposed"] else self.time_axis

    def forward(self, x):
        draws, t = self.draws, self.time_axis
        if draws["transposed"]:
            x = x.transpose(0, 1)
        if draws["front"] == "Conv1d":
            x = x.movedim(t, 2)
            x = self.front(x if t else x.transpose(0, 1) if x.shape[1] != self.front.in_channels else x).movedim(2, t)
        elif self.front is not None:
            x = self.front(x)
        x = self.drop(OPERATIONS[draws["before"]](x, t))
        y, last = self.run_cells(x) if draws["kind"].endswith("Cell") else self.rnn(x)
        if draws["kind"] == "twice":
            y, last = self.rnn(y)
        if draws["kind"] == "two":
            y, last = self.upper(self.drop(y))
        y = OPERATIONS[draws["behind"]](y, t)
        if draws["residual"] and y.shape == x.shape:
            y = y + x
        y = self.drop(y)
        if draws["returns"] == "last step":
            y = y.select(t, -1)
        elif draws["returns"] == "state":
            y = last[0] if isinstance(last, tuple) else last
            y = torch.cat([*y[-2:]], -1) if getattr(self.rnn, "bidirectional", False) and draws["kind"] != "two" else y
        if self.head is not None:
            y = self.head(y)
        if draws["returns"] in ("y", "tuple", "dict"):
            y = OPERATIONS[draws["end"]](y, t)
            if draws["transposed"]:
                y = y.transpose(0, 1)
        return {"tuple": (y, last), "dict": {"y": y, "last": last}}.get(draws["returns"], y)

    def run_cells(self, x):
        """Run the cell on one step after the other."""
        state, ys = None, []
        for step in x:
            state = self.rnn(step, state)
            ys.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(ys), state


class DrawnSequential(nn.Sequential):
    """A random Sequential with a forward of its own."""

    def forward(self, x):
        y = self[0](OPERATIONS[self.before](x, 0))[0]
        return OPERATIONS[self.behind](y, 0)


def draw_module(g):
    """Draw a module, a function that draws an input, and hooks for some."""
    if g.integers(8):
        model = Drawn(g)
        return model, model.draw_input
    model, names = DrawnSequential(nn.GRU(3, 5)), IDENTITIES * 16 + [*OPERATIONS]
    model.before, model.behind = (names[g.integers(len(names))] for _ in range(2))
    model.draws = {"before": model.before, "behind": model.behind}
    return model, lambda g, T, B: torch.from_numpy(g.standard_normal((T, B, 3)).astype(np.float32))


def first_tensor(result):
    if isinstance(result, torch.Tensor):
        return result
    return first_tensor(next(iter(result.values() if isinstance(result, dict) else result)))


def computes_the_same(layers, model, draw_input, g):
    """Return whether the layer, or layers of a dict in some order, compute what the model does."""
    x = draw_input(g, 9, 4)
    expected = first_tensor(copy.deepcopy(model).eval()(x)).detach().numpy()
    if x.dtype == torch.int64:
        return False
    orders = [[*layers.values()], [*layers.values()][::-1]] if isinstance(layers, dict) else [[layers]]
    for chain in orders:
        for batch_first in (False, True):
            y = x.numpy()
            for layer in chain:
                y = layer(y, batch_first=batch_first)[0] if y.shape[-1] == layer.input_size else np.zeros(0)
                if not y.size:
                    break
            if y.shape == expected.shape and np.abs(y - expected).max() < 1e-5:
                return True
    return False


def labels_are_right(draws, message):
    """Return whether a warning names operations before and behind the layers where there are any, and nowhere else."""
    is_changed = {name: draws.get(name, "none") not in IDENTITIES for name in ("before", "behind", "end")}
    if draws.get("returns") in ("last step", "state"):
        is_changed["end"] = False  # it is not applied to these
    before = is_changed["before"] and (draws.get("front"), draws["before"]) != ("ReLU", "relu")
    behind = is_changed["end"]
    if not draws.get("head"):
        behind |= is_changed["behind"] or draws.get("residual", False) or draws.get("returns") in ("last step", "state")
    again = draws.get("kind") == "twice"
    texts = {"forward before": before, " behind ": behind, "called more than once": again}
    texts["(ReLU)"] = draws.get("front") == "ReLU" and not before
    return all((text in message) == is_expected for text, is_expected in texts.items())


def verdict_on(model, draw_input, g):
    """Say how a model was converted."""
    result, message = converted(model)
    if isinstance(result, ConversionError):
        is_right = computes_the_same(convert.from_torch(model, check=False), model, draw_input, g)
        return "refused, though it is right" if is_right else "refused"
    if not message:
        return "right" if computes_the_same(result, model, draw_input, g) else "wrong in silence"
    if "not compared" in message:
        return "not compared"
    return "in part, with a warning" if labels_are_right(model.draws, message) else "in part, with another warning"


def test_random_modules(seed):
    """No model is converted wrongly without a word, none that is right is refused, and warnings say what is there."""
    verdicts = Counter()
    for k in range(200):
        g = np.random.default_rng([seed, k])
        torch.manual_seed(k)
        model, draw_input = draw_module(g)
        verdict = verdict_on(model, draw_input, g)
        verdicts[verdict] += 1
        assert verdict in ("right", "refused", "in part, with a warning"), f"module {k}: {verdict}, {model.draws}"
    print(dict(verdicts))
    assert len(verdicts) == 3 and min(verdicts.values()) >= 20


# ------------------------------------------------------------------------------------------------------- whole models
class Derived(nn.LSTM):
    def forward(self, x, hx=None):
        y, last = super().forward(2 * x, hx)
        return y + 1, last


class StateDropped(nn.GRU):
    def forward(self, x, hx=None):
        return super().forward(x)


class OwnSequential(nn.Sequential):
    def forward(self, x):
        return 2 * self[0](x)[0]


def run_cell(cell, x, zoneout=0.0):
    """Return the states of a cell without a cell state, of which each keeps a part of the one before."""
    h, ys = x.new_zeros(x.shape[1], cell.hidden_size), []
    for step in x:
        h = zoneout * h + (1 - zoneout) * cell(step, h) if zoneout else cell(step, h)
        ys.append(h)
    return torch.stack(ys)


def change_weights(rnn):
    """Change the recurrent weights, as weight drop does."""
    rnn.weight_hh_l0.data.mul_(0.5)


WRONG = {
    "derived": (lambda: Derived(4, 4), r"y of the model at \(0, 0, 0\).*parts that do nothing: Derived.forward\. If"),
    "state not used": (lambda: StateDropped(4, 4), r"y of the model at \(0, 0, .*: StateDropped.forward"),
    "residual": (
        lambda: Model(lambda m, x: x + m.rnn(x)[0]),
        r"operations of its forward behind 'rnn'\. .*pass check=False, or prefix='rnn.' for that part alone$",
    ),
    "bound": (lambda: Model(lambda m, x: m.rnn(x.clamp(-5, 5))[0]), "operations of its forward before 'rnn'"),
    "weights changed": (lambda: Model(lambda m, x: change_weights(m.rnn) or m.rnn(x)[0]), "y of 'rnn' at"),
    "reversed": (
        lambda: Model(lambda m, x: m.rnn(x.flip(0))[0].flip(0)),
        "operations of its forward before 'rnn', operations of its forward behind 'rnn'",
    ),
    "called twice": (lambda: Model(lambda m, x: m.rnn(m.rnn(x)[0])[0]), "that 'rnn' is called more than once"),
    "own Sequential": (lambda: OwnSequential(nn.LSTM(4, 4)), "operations of its forward behind '0'"),
    "own state": (
        lambda: Model(lambda m, x: m.rnn(x, (torch.ones(1, x.shape[1], 4),) * 2)[0]),
        "the state from which 'rnn' starts",
    ),
    "cells backwards": (
        lambda: Model(lambda m, x: run_cell(m.rnn, x.flip(0)), nn.GRUCell(4, 4)),
        "operations of its forward before 'rnn'",
    ),
    "zoneout": (
        lambda: Model(lambda m, x: run_cell(m.rnn, x, 0.1), nn.GRUCell(4, 4)),
        "the state from which 'rnn' starts",
    ),
    "no gradient mode": (lambda: Model(lambda m, x: m.rnn(x)[0] + torch.is_grad_enabled() * 0 + 0.1), "behind 'rnn'"),
    "two tensors": (lambda: Model(lambda m, x: (m.rnn(x)[0] * 2, x)), "behind 'rnn'"),
    "batch first and time first": (lambda: Model(lambda m, x: m.rnn(x)[0].transpose(0, 1)), "has shape"),
    "no step after the 60th": (
        lambda: Model(lambda m, x: m.rnn(x)[0] * (torch.arange(len(x))[:, None, None] < 60)),
        "behind 'rnn'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_models_that_compute_something_else(case):
    make, text = WRONG[case]
    model = make()
    with pytest.raises(ConversionError, match=rf"^from_torch: the layer computes something else than .*{text}"):
        convert.from_torch(model)
    name = next(name for name, _ in model.named_parameters()).rpartition(".")[0]
    weights = {f"{name}.{key}".removeprefix("."): t for key, t in model.get_submodule(name).state_dict().items()}
    assert_same(convert.from_torch(model, check=False), convert.from_torch(weights, check=False))


def pack(m, x):
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((x.shape[1],), len(x)))
    return nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0])[0]


def print_and_change(m, x):
    print("the shape of x is", x.shape)
    y = m.rnn(x)[0].clone()
    x.zero_()
    return y


def step_by_step(m, x):
    state, ys = None, []
    for step in x:
        y, state = m.rnn(step[None], state)
        ys.append(y)
    return torch.cat(ys)


def keep_state(m, x):
    y, m.state = m.rnn(x, m.state)
    return y


def quantized_model():
    model = nn.Sequential(nn.LSTM(4, 5))
    blockcell.torch.replace(model, quantize="int8")
    return model


@dataclasses.dataclass
class Output:
    """What a model returns."""

    y: torch.Tensor


RIGHT = {
    "dataclass": lambda: Model(lambda m, x: Output(m.rnn(x)[0])),
    "tuple": lambda: Model(lambda m, x: m.rnn(x)),
    "dict": lambda: Model(lambda m, x: {"y": m.rnn(x)[0]}),
    "transposed": lambda: Model(lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1)),
    "batch first": lambda: Model(lambda m, x: m.rnn(x)[0], nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True)),
    "flipped twice": lambda: Model(lambda m, x: m.rnn(x.flip(0).flip(0))[0] * 1.0),
    "packed": lambda: Model(pack),
    "cells": lambda: Model(lambda m, x: run_cell(m.rnn, x), nn.GRUCell(4, 5)),
    "step by step": lambda: Model(step_by_step),
    "dropout": lambda: Model(lambda m, x: m.drop(m.rnn(m.drop(x))[0]), drop=nn.Dropout(0.5)),
    "prints and changes x": lambda: Model(print_and_change),
    "keyword": lambda: Model(lambda m, x: m.rnn(input=x, hx=None)[0]),
    "float64": lambda: Model(lambda m, x: m.rnn(x)[0], nn.RNN(4, 5, nonlinearity="relu", dtype=torch.float64)),
    "float16": lambda: Model(lambda m, x: m.rnn(x)[0], nn.LSTM(4, 5, dtype=torch.float16)),
    "projection": lambda: nn.LSTM(4, 5, 2, proj_size=3, bidirectional=True, batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(4, 5),
    "RNNCell": lambda: nn.RNNCell(4, 5, nonlinearity="relu", bias=False),
    "Linear": lambda: nn.Linear(4, 5),
    "derived": lambda: type("Mine", (nn.GRU,), {})(4, 5),
    "blockcell": lambda: blockcell.torch.LSTM(4, 5, 2, batch_first=True),
    "blockcell's cell": lambda: blockcell.torch.GRUCell(4, 5),
    "quantized": quantized_model,
    "DataParallel": lambda: nn.DataParallel(Model(lambda m, x: m.rnn(x)[0])),
    "compiled": lambda: torch.compile(Model(lambda m, x: m.rnn(x)[0]), backend="eager"),
    "Sequential": lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.LSTM(4, 5)), nn.Linear(5, 2)),
    "Sequential that keeps a tuple": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.LSTM(4, 5, 2)),
    "two": lambda: Model(lambda m, x: m.upper(m.rnn(x)[0])[0], upper=nn.GRU(4, 3)),
    "keeps its state": lambda: Model(keep_state, state=None),
    "large": lambda: nn.LSTM(300, 200, 2, bidirectional=True),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_models(case, capsys):
    """They are converted without a word, also from the program's point of view."""
    model = RIGHT[case]()
    capsys.readouterr()
    layer = convert.from_torch(model, check=True)
    assert capsys.readouterr() == ("", "")
    assert repr(layer) == repr(convert.from_torch(model, check=False))


# ------------------------------------------------------------------------------------------------------ parts of models
class Flip(nn.Module):
    def forward(self, x):
        return x.flip(0)


PARTS = {
    "front and head": (lambda m, x: m.head(m.rnn(m.front(x))[0]), ""),
    "before": (lambda m, x: m.head(m.rnn(m.front(x).flip(0))[0]), ", operations of its forward before 'rnn'"),
    "behind": (lambda m, x: m.head(m.rnn(m.front(x))[0]).cumsum(0), ", operations of its forward behind 'head'"),
    "state": (
        lambda m, x: m.head(m.rnn(m.front(x), (torch.ones(1, x.shape[1], 4),) * 2)[0]),
        ", the state from which 'rnn' starts",
    ),
    "twice": (lambda m, x: m.head(m.rnn(m.rnn(m.front(x))[0])[0]), ", that 'rnn' is called more than once"),
    "module without weights": (lambda m, x: m.head(m.rnn(m.flip(m.front(x)))[0]), r", flip \(Flip\)"),
    "step by step": (
        lambda m, x: torch.stack([m.head(y) for y in m.rnn(torch.stack([m.front(step) for step in x]))[0]]),
        ", operations of its forward before 'rnn', operations of its forward behind 'head'",
    ),
    "not called": (
        lambda m, x: m.head(m.rnn.forward(m.front(x))[0]),
        ", what its forward does with 'rnn'",
    ),
}


@pytest.mark.parametrize("front", [nn.Embedding(9, 4, padding_idx=2), nn.Linear(7, 4)], ids=repr)
@pytest.mark.parametrize("case", PARTS)
def test_parts_of_models(case, front):
    function, labels = PARTS[case]
    model = Model(function, front=front, head=nn.Linear(4, 2), flip=Flip())
    weights = "weight, bias" if isinstance(front, nn.Linear) else "weight"
    with pytest.warns(UserWarning) as record:
        layer = convert.from_torch(model)
    assert_same(layer, convert.from_torch(model.rnn))
    [message] = [str(warning.message) for warning in record]
    expected = f"from_torch: left out: front ({weights}), head (weight, bias)"
    assert message.startswith(expected)
    assert converter.re.fullmatch(labels, message.removeprefix(expected))


def test_results_of_another_shape():
    """A model of one LSTM that returns something of another kind than y is one of which the LSTM is a part."""
    for function in (lambda m, x: m.rnn(x)[1][0][-1], lambda m, x: m.rnn(x)[0][::2], lambda m, x: m.rnn(x)[0].sum(-1)):
        layer, message = converted(Model(function))
        assert message == "from_torch: left out: operations of its forward behind 'rnn'"
        assert layer.hidden_size == 4


def test_the_error_names_the_prefix():
    """Also within a module of PyTorch's that wraps the model."""
    model = nn.DataParallel(Model(lambda m, x: x + m.rnn(x)[0]))
    with pytest.raises(ConversionError, match=r", or prefix='module\.rnn\.' for that part alone$"):
        convert.from_torch(model)
    assert convert.from_torch(model, prefix="module.rnn.").hidden_size == 4


def test_more_results():
    """Others than the first must be known, too, or the warning says so."""
    for change, text in ((1, ""), (2, "from_torch: left out: operations of its forward behind 'rnn'")):
        model = Model(lambda m, x, change=change: (lambda y, last: (y, change * last))(*m.rnn(x)), nn.GRU(4, 5))
        assert converted(model)[1] == text


def test_other_layouts():
    """The batch may come first or not; the features must come last."""
    rnn = nn.GRU(4, 5)
    for model, name in (
        (Model(lambda m, x: m.rnn(x.permute(2, 0, 1))[0].permute(1, 2, 0), rnn), "before 'rnn'"),
        (Model(lambda m, x: m.rnn(x)[0].permute(1, 2, 0), rnn), "behind 'rnn'"),
    ):
        assert f"operations of its forward {name}" in converted(model)[1]


def test_a_module_with_two_names():
    rnn = nn.GRU(4, 4)
    layers, message = converted(Model(lambda m, x: m.rnn(x)[0], rnn, again=rnn))
    assert layers.keys() == {"rnn", "again"} and message == ""


class WeightDropout(nn.Module):
    """Drops recurrent weights in training, as fastai's does."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.weight_hh_l0_raw = nn.Parameter(module.weight_hh_l0.detach().clone())
        del module._parameters["weight_hh_l0"]
        self._set()

    def _set(self):
        self.module.weight_hh_l0 = nn.functional.dropout(self.weight_hh_l0_raw, 0.5, self.training)

    def forward(self, *arguments):
        self._set()
        return self.module(*arguments)


def test_weight_drop():
    """Weights are attributes of the module, and not parameters, between two calls."""
    model = nn.Sequential(WeightDropout(nn.LSTM(4, 5)))
    layer, message = converted(model[0])
    assert message == ""
    assert (layer.weights["w"] != 0).all() and (model[0].module.weight_hh_l0 == 0).any()


def test_sequential_with_a_part_between():
    """Each part is compared on what the others give."""
    model = nn.Sequential(nn.GRU(3, 4), nn.LayerNorm(4), nn.LSTM(4, 5), nn.Linear(5, 2))
    layers, message = converted(model)
    assert message == "from_torch: left out: 1 (LayerNorm), 3 (Linear)" and layers.keys() == {"0", "2"}
    model[2] = nn.LSTM(4, 5, batch_first=True)  # the axes of the first are the other way round
    assert converted(model) == (layers, message) or converted(model)[1] == message
    del model[1]
    with pytest.raises(ConversionError, match="y of the model"):
        convert.from_torch(model)


def test_two_layers_with_operations_between():
    model = Model(lambda m, x: m.upper(m.rnn(x)[0].flip(0))[0], upper=nn.GRU(4, 3))
    layers, message = converted(model)
    assert message == "from_torch: left out: operations of its forward before 'upper'"
    assert layers.keys() == {"rnn", "upper"}


@pytest.mark.parametrize("prefix", ["rnn.", "upper."])
def test_a_part_by_its_prefix(prefix):
    """It is compared with that module alone, whatever the model does with it."""
    model = Model(lambda m, x: m.upper(2 * m.rnn(x)[0]), upper=nn.GRU(4, 3))
    layer, message = converted(model, prefix=prefix)
    assert not message and layer.hidden_size == {"rnn.": 4, "upper.": 3}[prefix]
    model.rnn = Derived(4, 4)
    result, message = converted(model, prefix=prefix)
    assert not message and isinstance(result, ConversionError) == (prefix == "rnn.")
    assert converted(Model(None, head=nn.Linear(4, 2)), prefix="head.")[1] == ""


# ------------------------------------------------------------------------------------------------ what is not compared
def fixed_batch(m, x):
    return m.rnn(x, (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))[0]


class StepModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x, state):
        return self.cell(x, state)


@pytest.mark.parametrize("options", [{"prefix": "decoder.cell."}, {"check": False}, {}], ids=repr)
def test_zoneout_around_a_cell(options):
    """Neither a comparison of the cell alone nor none shows it: the class's name does."""
    model = nn.ModuleDict({"decoder": type("ZoneOutCell", (StepModel,), {})()})
    assert "'decoder.cell' has zoneout by its name, which is not converted" in converted(model, **options)[1]
    assert converted(StepModel(), prefix="cell.")[1] == ""


def hooked():
    model = nn.LSTM(4, 4)
    model.register_forward_hook(lambda *_: None)
    return model


class Uncopied:
    def __deepcopy__(self, memo):
        raise TypeError("no copies")


def with_hook(module):
    module.register_forward_pre_hook(lambda *_: None)
    return module


ALONE = "; its converted parts alone compute the same"
NOT_COMPARED = {
    "weights": (lambda: nn.LSTM(3, 4).state_dict(), "only weights were given: pass the module, or check=False"),
    "other arguments": (StepModel, "its forward needs x and state" + ALONE),
    "raises": (
        lambda: Model(lambda m, x: m.nothing),
        "its forward raises AttributeError for x of shape .*: 'Model' object has no attribute 'nothing'" + ALONE,
    ),
    "random": (
        lambda: Model(lambda m, x: nn.functional.dropout(m.rnn(x)[0])),
        "it is random: two runs on the same inputs differ" + ALONE,
    ),
    "no tensor": (lambda: Model(lambda m, x: m.rnn(x) and 3), "its forward returns no tensor" + ALONE),
    "hook": (hooked, "it has hooks of its own: check=True runs them"),
    "hook on a part": (
        lambda: Model(lambda m, x: m.rnn(x)[0], drop=with_hook(nn.Dropout())),
        "it has hooks of its own: check=True runs them" + ALONE,
    ),
    "lazy": (
        lambda: Model(lambda m, x: m.head(m.rnn(x)[0]), head=nn.LazyLinear(3), upper=nn.GRU(4, 4)),
        "it has parameters without values",
    ),
    "cannot be copied": (lambda: Model(lambda m, x: m.rnn(x)[0], file=Uncopied()), "it cannot be copied: no copies"),
}


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_not_compared(case):
    make, reason = NOT_COMPARED[case]
    with pytest.warns(UserWarning) as record:
        convert.from_torch(make())
    [warning] = record
    text = rf"from_torch: (left out: head \(weight, bias\); )?not compared with the model, because {reason}"
    assert converter.re.fullmatch(text, str(warning.message)), warning.message
    assert warning.filename == __file__
    assert converted(make(), check=False)[1] in ("", "from_torch: left out: head (weight, bias)")


class Lengths(nn.LSTM):
    def forward(self, x, lengths):
        return super().forward(x)


class Sums(nn.GRU):
    def forward(self, x, hx=None):
        y, last = super().forward(x, hx)
        return y, last.sum(), last


def test_derived_classes_with_other_arguments_and_results():
    """They are compared as far as these are known."""
    assert "Lengths.forward() missing 1" in converted(Lengths(4, 5))[1]
    model = Model(lambda m, x: m.head(m.rnn(x, torch.full((x.shape[1],), 3))[0]), Lengths(4, 5), head=nn.Linear(5, 2))
    assert "because 'rnn' raises TypeError for x of shape" in converted(model)[1]
    assert converted(Sums(4, 5, bidirectional=True))[1] == ""


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torch_jit():
    text = "from_torch: not compared with the model, because it is compiled by torch.jit: pass the module that was"
    for model in (nn.LSTM(4, 5), nn.Sequential(nn.GRU(4, 5))):
        assert converted(torch.jit.script(model))[1] == text
        assert converted(nn.Sequential(torch.jit.script(model)))[1].endswith(text.removeprefix("from_torch: "))


def test_not_a_module():
    class Stranger:
        def state_dict(self):
            return nn.LSTM(3, 4).state_dict()

    text = "from_torch: not compared with the model, because it is no PyTorch module: pass the module, or check=False"
    assert converted(Stranger())[1] == text


@pytest.mark.parametrize("source", ["module", "state_dict"])
def test_one_warning_says_all(source):
    model = nn.ModuleDict({"decoder": StepModel(), "head": nn.Linear(4, 2), "rnn": nn.RNN(4, 4)})
    _, message = converted(model if source == "module" else model.state_dict())
    for text in ("left out: head", "not compared with the model, because"):
        assert text in message
    assert ("do not tell the nonlinearity" in message) == (source == "state_dict")


def test_fixed_batch():
    """The remark says that nothing is proven for other sizes."""
    _, message = converted(Model(fixed_batch))
    assert message == "from_torch: compared for B = 1 alone, which the model fixes"


@pytest.mark.parametrize("register", ["forward_hook", "forward_pre_hook", "global"])
def test_hooks(register):
    """They run with check=True alone."""
    model, calls = nn.GRU(4, 4), []
    if register == "global":
        handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    else:
        handle = getattr(model, f"register_{register}")(lambda *_: calls.append(1))
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(handle.remove)
        assert "hooks of its own" in converted(model)[1] and not calls
        assert converted(model, check=True)[1] == "" and calls
        handle.remove()
    model.register_forward_hook(lambda module, arguments, result: (3 * result[0], result[1]))
    assert isinstance(converted(model, check=True)[0], ConversionError)


# --------------------------------------------------------------------------------------------- learned initial states
@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("prefix", [None, "rnn."])
def test_learned_initial_states(is_right, with_head, prefix):
    def forward(m, x):
        h, c = (state.repeat(1, x.shape[1], 1) for state in (m.h0, m.c0))
        y = m.rnn(x, (h, c) if is_right else (c, h))[0]
        return m.head(y) if with_head else y

    states = {name: nn.Parameter(torch.randn(2, 1, 4)) for name in ("h0", "c0")}
    head = {"head": nn.Linear(8, 2)} if with_head else {}
    model = Model(forward, nn.LSTM(4, 4, bidirectional=True), **states, **head)
    result, message = converted(model, prefix=prefix, initial_state=("h0", "c0"))
    assert isinstance(result, ConversionError) != is_right
    if is_right:
        assert message == ("from_torch: left out: head (weight, bias)" if with_head and prefix is None else "")
        x = torch.randn(6, 3, 4)
        y = result[0](x.numpy(), result[1])[0]
        np.testing.assert_allclose(y, model.rnn(x, tuple(s.expand(2, 3, 4).contiguous() for s in states.values()))[0]
                                   .detach().numpy(), rtol=0, atol=2e-6)  # fmt: skip


# ------------------------------------------------------------------------------------------------- what is left alone
def snapshot(model):
    """Return all that a run may change in a model, and the random states."""
    parts = {name: (part.training, len(part._forward_hooks), [*vars(part)]) for name, part in model.named_modules()}
    tensors = {name: (tensor.clone(), tensor._version) for name, tensor in model.state_dict().items()}
    grads = {name: (p.grad.clone(), p.requires_grad) for name, p in model.named_parameters()}
    return parts, tensors, grads, copy.deepcopy(model.kept), model.counts


def assert_equal(first, second):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        assert_equal([*first.values()], [*second.values()])
    elif isinstance(first, (tuple, list)):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_equal(a, b)
    else:
        assert first == second


def busy_forward(m, x):
    """Change all that a forward can change of its model."""
    m.counts += 1
    m.calls += 1
    m.kept.append(x.sum())
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    y, m.hidden = m.rnn(x)
    m.noise.uniform_()
    return m.norm(y.movedim(0, 2)).movedim(2, 0)


@pytest.mark.parametrize("check", [None, True])
def test_the_module_is_left_alone(check):
    model = Model(busy_forward, norm=nn.BatchNorm1d(4), drop=nn.Dropout(), counts=0, kept=[])
    for name, buffer in (("calls", torch.zeros(())), ("noise", torch.zeros(3))):
        model.register_buffer(name, buffer)
    model(torch.randn(5, 3, 4)).sum().backward()  # its attribute `hidden` has a history now
    model.train()
    model.drop.eval()
    model.rnn.weight_hh_l0.requires_grad_(False)
    with torch.no_grad():
        before = snapshot(model)
    random_states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    hidden = model.hidden
    layer, message = converted(model, check=check)
    assert message == (
        "from_torch: left out: (calls, noise), norm (weight, bias, running_mean, running_var, num_batches_tracked)"
    )
    assert_equal(snapshot(model), before)
    assert model.hidden is hidden
    assert random.getstate() == random_states[0]
    assert np.array_equal(np.random.get_state()[1], random_states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), random_states[2])
    assert torch.is_grad_enabled()
    assert layer.weights["w"].shape == (8, 16)


def test_the_context_is_left_alone():
    """Autocast and a coarser precision of products do not make a right layer a wrong one."""
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert converted(nn.Sequential(nn.LSTM(40, 50), nn.Linear(50, 60)))[1] == ""
                assert torch.is_autocast_enabled("cpu")
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision("highest")
