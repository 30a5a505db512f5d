"""What the comparisons with PyTorch and Keras themselves have in common."""

from __future__ import annotations

import numpy as np

from blockcell import GRUState, LSTMState

BOUNDS = {"float64": 1e-12 / np.finfo(np.float64).eps, "float32": 8}  # in eps of an array's largest entry
CONFIGURATIONS = 200


def check_configurations(compare, bound, seed, count=CONFIGURATIONS):
    """Compare configurations with another library, print the largest error, and let none exceed the bound.

    ``compare(g, k)`` draws the k-th configuration from g, and returns an error, and where that is.
    """
    worst = 0.0, "nothing"
    for k in range(count):
        error, place = compare(np.random.default_rng([seed, k]), k)
        worst = max(worst, (error, f"{place}, configuration {k}"))
        assert error <= bound, f"{error:.2f} at {place}, configuration {k}; the bound is {bound:.2f}"
    print(f"{worst[0]:.2f} at {worst[1]}")


def random_sizes(g, dtype):
    """Draw T, B, I and H.  With few cells in float32, the largest entry may be what little is left of others."""
    return tuple(int(size) for size in g.integers((1, 1, 1, 1 if dtype == "float64" else 8), (20, 12, 24, 40)))


def state_of(parts, layers, directions):
    """Return the state of a layer, or of a stack of layers, made of its cells' states: (h, cs) or (h,), in order."""
    cells = [LSTMState(*part[::-1]) if len(part) == 2 else GRUState(*part) for part in parts]
    states_of_layers = [tuple(cells[k : k + 2]) for k in range(0, len(cells), 2)] if directions == 2 else cells
    return tuple(states_of_layers) if layers > 1 else states_of_layers[0]


def parts_of(state, layers, directions):
    """Return the states of the cells, as `state_of` takes them."""
    states_of_layers = state if layers > 1 else [state]
    return [cell[::-1] for part in states_of_layers for cell in (part if directions == 2 else [part])]


def difference(result, expected, least=0.0):
    """Return the largest difference, in the largest expected entry, or in `least` if that is more."""
    largest, scale = np.abs(result - expected).max(initial=0), np.abs(expected).max(initial=least)
    return 0.0 if largest == 0 else largest / scale


def errors_of(pairs, dtype, terms=None):
    """Return the largest difference of each array from the expected one, in eps of its largest entry.

    `terms` has, by name, how large the sums would be that such an array consists of, if terms did not happen to cancel.
    """
    errors = {}
    for name, (result, expected) in pairs.items():
        expected = np.asarray(expected)
        assert result.shape == expected.shape and result.dtype == dtype, name
        errors[name] = difference(result, expected, (terms or {}).get(name, 0.0)) / float(np.finfo(dtype).eps)
    return errors


def worst_of(pairs, dtype, terms=None):
    """Return the largest of all differences, in eps, and the array that has it."""
    errors = errors_of(pairs, dtype, terms)
    return max(errors.values()), max(errors, key=errors.get)
