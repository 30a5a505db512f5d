"""Two things swapped in a kernel's source must make the kernel tests fail.

`make test-all` builds each mutant without optimisation in a copy of the checkout; takes hours, one to two of them
with ccache: CC="ccache gcc" make test-all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blockcell import _cpu

ROOT = Path(__file__).resolve().parents[2]
QUANTIZATION = "../blockcell/quantization.py"  # from pyx/ on


def swap(one: str, other: str) -> dict[str, str]:
    """Return the changes that put each of two texts in the other's place."""
    return {one: other, other: one}


def by_name(mutants: dict[str, dict[str, dict[str, str]]]) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the source and the changes of each mutant of these sources."""
    return {what: (source, changes) for source, named in mutants.items() for what, changes in named.items()}


MUTANTS = by_name(
    {  # what is swapped: what changes, wherever it stands in the source
        "cells/lstm.pxd": {
            "lstm i and f": swap("cell, i_bar,", "cell, f_bar,"),
            "lstm i and ci": {
                "i_bar[l] = z[I_BAR * L + l]": "i_bar[l] = z[CI_BAR * L + l]",
                "cell, z + ci_line * L,": "cell, z + I_BAR * L,",
            },
            "lstm f and o": {"f_line = F_BAR": "f_line = O_BAR", "o_line = O_BAR": "o_line = F_BAR"},
            "lstm ci and o": {"ci_line = CI_BAR": "ci_line = O_BAR", "o_line = O_BAR": "o_line = CI_BAR"},
            "lstm wci and wcf": swap("cs_state[l] * peep[PEEP_I", "cs_state[l] * peep[PEEP_F"),
            "lstm wcf and wco": swap("cs_state[l] * peep[PEEP_F", "cs_state[l] * peep[PEEP_O"),
            "lstm h and cs": {
                "y[OUT_CS * L + l] = cs": "y[OUT_H * L + l] = cs",
                "y[OUT_H * L + l] = y": "y[OUT_CS * L + l] = y",
            },
            "lstm d_i and d_f": {
                "dicfo[I_BAR * L + l] = d_cs": "dicfo[F_BAR * L + l] = d_cs",
                "dicfo[F_BAR * L + l] = d_cs": "dicfo[I_BAR * L + l] = d_cs",
                "cell, i, dicfo + I_BAR": "cell, i, dicfo + F_BAR",
                "cell, f, dicfo + F_BAR": "cell, f, dicfo + I_BAR",
            },
            "lstm d_ci and d_o": {
                "dicfo[O_BAR * L + l] = h_grad": "dicfo[CI_BAR * L + l] = h_grad",
                "dicfo[CI_BAR * L + l] = d_cs": "dicfo[O_BAR * L + l] = d_cs",
            },
            "lstm h_grad and cs_grad": {
                "d_h, inputs[H_GRAD], offset_of(&p.d_y_layout, t, row) + j * L,": "d_h, inputs[CS_GRAD], saved_line,",
                "space[0], inputs[CS_GRAD], saved_line,": "space[0], inputs[H_GRAD], saved_line,",
            },
            "lstm wci and wcf in the gradient": {
                "dicfo[I_BAR * L + l] * peep[PEEP_I": "dicfo[I_BAR * L + l] * peep[PEEP_F",
                "dicfo[F_BAR * L + l] * peep[PEEP_F": "dicfo[F_BAR * L + l] * peep[PEEP_I",
            },
            "lstm wci_grad and wcf_grad": swap("grads[WCI], d", "grads[WCF], d"),
            "coupled ci and f": {"ci_line = CI_BAR": "ci_line = F_BAR", "f_line = F_BAR": "f_line = CI_BAR"},
            "coupled i is f": {"y[OUT_I * L + l] = one - y[OUT_F * L + l]": "y[OUT_I * L + l] = y[OUT_F * L + l]"},
            "coupled o is where four gates have it": {"o_line = O_BAR - lstm.coupled": "o_line = O_BAR"},
            "coupled d_f without i's part": {"cs_prev[l] - ci[l] if": "cs_prev[l] if"},
            "projected without its clip": {"h[l] = -clip if h[l] < -clip else h[l]": "h[l] = h[l]"},
            "projected: the gradient passes the clip": {"h[l] >= clip or h[l] <= -clip": "h[l] > 2 * clip"},
            "projected: what is carried is left out": {
                "product + (j - j0) * L, d_row +": "p.scratch + p.start[D_H] + b * p.Ps + j * L, d_row +",
            },
            "projected: cs goes past a reset": {"if has_flag(&p.steps, k, b, RESET):": "if False:"},
            "projected: the weights' gradient without co": {"PEEP_LINES, 6, OUT_CO": "PEEP_LINES, 6, OUT_O"},
        },
        "_ops.pyx": {
            "lstm icfo and ifco": {"2 if ifco else 1, 1 if ifco else 2": "1 if ifco else 2, 2 if ifco else 1"},
        },
        "passes/forward.pxd": {
            "lstm h_prev and cs_prev": swap("inputs[H_PREV], &p.", "inputs[CS_PREV], &p."),
            "projected from cs": {"p.start[M if p.c.projects else HR]": "p.start[CS if p.c.projects else HR]"},
            "rows of h that are stored whole are those of the step before": {
                "h_before(p, step.rows, step.k + 1) + b * p.Ps, p.P": "h_before(p, step.rows, step.k) + b * p.Ps, p.P",
            },
            "panels of two: the wrong one is taken apart": {
                "expand_gates(w, i - 1, 1, panel_sums + (count - 1) * z_panel)": (
                    "expand_gates(w, i - 1, 1, panel_sums)"
                ),
            },
        },
        "cells/gru.pxd": {
            "gru r and u": swap("cell, z + R_BAR", "cell, z + U_BAR"),
            "gru c and h_prev": {"u[l] * (h[l] - c[l]) + c[l]": "u[l] * (c[l] - h[l]) + h[l]"},
            "gru d_r_bar and d_u_bar": {
                "d_row + U_BAR * p.H + j * L, d_u_bar": "d_row + R_BAR * p.H + j * L, d_u_bar",
                "d_row + R_BAR * p.H + j * L, d_r_bar": "d_row + U_BAR * p.H + j * L, d_r_bar",
            },
            "gru r and u in the gradient": swap(
                "inputs[OUT_R], saved_line, width)", "inputs[OUT_U], saved_line, width)"
            ),
            "activations: of c for that of u in a GRU": {"gate_grad(cell, u,": "gate_grad(cell, c,"},
        },
        "product/panels.pxd": {
            "gates that share lines are taken apart wrongly": {"row[gate * width + l] if": "row[gate * L + l] if"},
            "gates that share lines are taken apart from the first on": {
                "gate = p.gates - 1\n        while gate >= 0:": "gate = 0\n        while gate < p.gates:",
                "gate -= 1": "gate += 1",
            },
            "gates that share lines are taken apart in the first line of units": {
                "row = z + (q * LINES + u * p.gates) * L": "row = z + q * LINES * L",
            },
            "gates that share lines are packed side by side": {"g = u * p.gates + l // L": "g = u * p.gates + gate"},
            "gates that share lines are packed in another order": {
                "gate_column(p, j, u, gate) + l - l0": "gate_column(p, j, u, p.gates - 1 - gate) + l - l0",
            },
            "biases of gates that share lines stand side by side": {
                "bias + u * p.gates * L + gate * width": "bias + u * p.gates * L + gate * L",
            },
            "gates share lines in the first panel": {"if j == p.count - 1 else 0)": "if j == 0 else 0)"},
            "gates share too few lines": {"(p.J - 1) * L) + L - 1) // L": "(p.J - 1) * L)) // L"},
            "reset after: gates share lines": {"if p.J > 0 and not p.separate:": "if p.J > 0:"},
            "reset after: b_c for b_hc": {"at(b[MATRICES], j": "at(b[1], j"},
            "torch w_hh from the start": {"column * p.R + k - p.I": "column * p.R + k"},
            "torch gates that share lines are packed from one column": {
                "column // width) + column % width": "column // width)",
            },
            "torch w_h for w_x that is not packed": {
                "add_transposed_product(p, w, True, product, j,": "add_transposed_product(p, w, False, product, j,",
            },
            "integers: scales of x for h": {"line += p.separate": "line += 0"},
            "stored lines of x for h": {"gate_lane(p, j, u, gate, k < p.I))": "gate_lane(p, j, u, gate, True))"},
            "integers: scales of h for x": {
                "p.separate * L + gate_lane(p, j, u, gate, False)": "p.separate * L + gate_lane(p, j, u, gate, True)",
            },
            "stored gates that share lines": {
                "u * p.gates * L + gate * columns_left(p, j, u)": "(u * p.gates + gate) * L",
            },
            "stored biases begin in the last line of weights": {
                "bytes_per_weight(p.format) + 63) // 64": "bytes_per_weight(p.format)) // 64",
            },
            "stored in panels of two: of other numbers of lines": {
                " or ((p.format != UNQUANTIZED or lines < LINES) and lines_in_panel(p, j + most - 1) < lines):": ":",
            },
            "panels of two: one more than there are": {"if j + most > end or (": "if j + most > end + 1 or ("},
            "panels of two: rows of h as far apart as those of x": {
                "p.size - k0 * (lines - last_lines) * L, K)": "p.size, K)",
            },
            "panels of two: as many lines in the last": {
                "last_lines = lines_in_panel(p, j + panels - 1)": "last_lines = lines",
            },
        },
        "schedule/plan.pxd": {
            "gates share lines where weights are not packed": {
                "if p.packs_all:\n        compact_gates(": "if True:\n        compact_gates(",
            },
            "rnn: one state for two steps": {"> 1:\n        p.start[H_ODD]": "> 0:\n        p.start[H_ODD]"},
            "weight gradients without the factor of the second product": {
                "c.traits.factor if n == 1 and c.products > 1 else 0": "0",
            },
        },
        "cells/gru_reset_after.pxd": {
            "reset after: r and u": swap("cell, z + R_BAR", "cell, z + U_BAR"),
            "reset after: xc and hc": {"= z[XC * L + l] +": "= z[HC * L + l] +", "* z[HC * L + l]": "* z[XC * L + l]"},
            "reset after: c and h_prev": {
                "(h_prev[l] - y[OUT_C * L + l]) + y[OUT_C * L + l]": "(y[OUT_C * L + l] - h_prev[l]) + h_prev[l]",
            },
            "reset after: d_r_bar and d_u_bar": {
                "d[D_U_BAR * L + l] = d_h": "d[D_R_BAR * L + l] = d_h",
                "d[D_R_BAR * L + l] = d": "d[D_U_BAR * L + l] = d",
            },
            "reset after: d_c_bar and d_hc": swap("d[D_C_BAR * L + l] = d", "d[D_HC * L + l] = d"),
            "activations: c before its reset": {"state(cell, c_bar,": "state(cell, z + XC * L,"},
        },
        "passes/backward.pxd": {
            "reset after: b_c_grad for b_hc_grad": {"<real> sums_h[l]": "<real> sums[l]"},
            "reset after: d_c_bar for d_hc": {
                "*d_h = p.scratch + p.start[D] + p.h_column[n]": "*d_h = p.scratch + p.start[D] + p.column[n]",
            },
            "torch w_ih for w_hh in the gradient": {"(W if of_x else W_H) + n], first": "W + n], first"},
            "torch d_c_bar for d_hc": {"H_TILES if p.separate[n] else X_TILES": "X_TILES"},
            "torch columns of d_c_bar for those of d_hc": {
                "at(rows[q].values, p.h_column[n] - p.column[n])": "rows[q].values",
            },
            "torch y without gaps": {
                "                                          &p.h_layout, t, row)": "&p.cs_layout, t, row)",
            },
            "float16: gradients of weights are summed where they are stored": {
                "    if holds_half(p.grads[W]):\n        return": "    if False:\n        return",
            },
        },
        "cells/rnn.pxd": {
            "rnn: the slope at the gradient": {"slope(&p.c.activation, h, s)": "slope(&p.c.activation, d_h, s)"},
            "rnn: units of the panel before": {"((b - b0) * LINES + unit_line) * L, h)": "(b - b0) * LINES * L, h)"},
        },
        "cells/activations.pxd": {
            "activations: tanh's for sigmoid's": {"cell).recurrent\n": "cell).activation\n"},
            "activations: sigmoid's for tanh's": {"cell).activation\n": "cell).recurrent\n"},
            "activations: scale and shift": {"v = a * z[l] + b\n": "v = b * z[l] + a\n"},
            "activations: elu's slope without alpha": {"v = y[l] + a\n": "v = y[l]\n"},
            "activations: the default for another one": {
                "if f.number != SIGMOID:": "if f.number == RELU:",
                "if f.number != TANH:": "if f.number == RELU:",
            },
        },
        "cells/dense.pxd": {
            "dense sigmoid and tanh": swap("z[l] = sigmoid(z[l])", "z[l] = tanh(z[l])"),
            "dense relu left out": {"z[l] = 0 if z[l] < 0 else z[l]": "z[l] = z[l]"},
            "dense softmax of what is beyond a row": {"z[l] = -INFINITY": "z[l] = 0"},
            "dense sigmoid and tanh in the gradient": swap("d[l] * y[l] * (one - y[l])", "d[l] * (one - y[l] * y[l])"),
            "dense relu left out of the gradient": {"d[l] if y[l] > 0 else 0": "d[l]"},
            "dense softmax without its sum in the gradient": {
                "y[j * L + l] * (d[j * L + l] - total)": "y[j * L + l] * d[j * L + l]",
            },
        },
        "passes/gradients.pxd": {
            "torch x_grad that is not added": {"before[l] + sums[l]": "sums[l]"},
            "ragged runs of rows across the end of a chain": {
                "min(<Py_ssize_t> PACK_ROWS, block.count[run.chain] - run.r)": "<Py_ssize_t> PACK_ROWS",
            },
            "lines of the first state alone": {"space, state, j * L, n)": "space, state, 0, n)"},
            "torch bias sums of the first columns": {"block.d_row[k] * ldd + column": "block.d_row[k] * ldd"},
            "ragged gradients of the row, not of its slot": {
                "t, row, t * s.B + slot_of_row(s, row)": "t, row, t * s.B + row",
            },
        },
        "product/quantized.pxd": {
            "stored in registers: half of another vector": {"(v0 + v) % VECTORS)": "v % VECTORS)"},
            "stored in registers: vectors from another one on": {
                "float16_tile(rows, 1, 3, 3, lines": "float16_tile(rows, 1, 2, 3, lines",
            },
            "stored in registers: blocks for the other rows": {
                "block[packed_vector(v0 + v,": "block[packed_vector(v0 // sub * sub + (v0 + v) % sub,",
            },
            "stored in registers: two lines as four": {"(lines >= 3 or": "(lines >= 2 or"},
            "stored in registers: loads past the last panel": {
                "prefetch_read(prefetch + k * LINE_BYTES)": (
                    "acc[0] = acc[0] + (<const float *> (prefetch + k * LINE_BYTES))[0] * <float> 0"
                ),
            },
            "stored in panels of two: one place for both": {
                "codes + i * panel_stride +": "codes +",
            },
        },
        "product/tile.pxd": {
            "panels of two: blocks as far apart as the first": {
                "panel_stride -= kb * (lines - last_lines) * L": "pass",
            },
            "tiles of several lines: from another vector on": {"tile(4, 1, 3, VECTORS,": "tile(4, 0, 3, VECTORS,"},
            "tiles of several lines: of one line": {
                "block[packed_vector(v0 + v,": "block[packed_vector(v0 // sub * sub + (v0 + v) % sub,",
            },
        },
        QUANTIZATION: {
            "rounded to int8 toward zero": {"np.rint(weights / scale)": "np.trunc(weights / scale)"},
            "rounded to int8 with one scale for all columns": {
                "np.abs(array).max(axis=0, initial=0)": "np.full(array.shape[1], np.abs(array).max(initial=0))",
            },
            "rounded to int8 with scales of zero": {"LEAST_SCALE, MOST_SCALE)\n": "np.float32(1e-45), MOST_SCALE)\n"},
            "rounded to int8 with infinite weights": {"LEAST_SCALE, MOST_SCALE)\n": "LEAST_SCALE, np.inf)\n"},
        },
        "product/lines.pxd": {
            "lines in place past the end of an array": {"n >= L and": "n >= 0 and"},
        },
        "passes/outputs.pxd": {
            "float16: states are not rounded": {"if p.c.is_half:": "if False:"},
            "reset state: that of the step before": {
                "reset_row(reset, step_at(&p.steps, k + 1), row": "reset_row(reset, step_at(&p.steps, k), row",
            },
        },
        "passes/steps.pxd": {
            "ragged rows in the slots of others": {"s.slots[b].row\n": "b\n"},
            "ragged rows that end a step early": {"s.slots[middle].length > t": "s.slots[middle].length > t + 1"},
            "ragged states of the last step of all": {"s.T if s.reverse or length_of(s, b) == 0": "s.T if True"},
            "reset state: no gradient": {"if reset.grads.data is not NULL:": "if False:"},
            "reset state: its gradient goes on": {"clear(grad, L)": "pass"},
            "reset state: zeros in the weights' gradients": {"return reset_row(reset, t, row)": "return no_array()"},
        },
        "passes/arrays.pxd": {
            "reset state: h for cs": {"array_of(a.reset_state[1]": "array_of(a.reset_state[0]"},
        },
        "product/integer.h": {
            "integers: top": {"scale /= 127.0f": "scale /= 128.0f"},
            "integers: no least scale": {"scale > 0x1p-126f ? scale : 0x1p-126f": "scale"},
            "integers: infinity": {"if (largest >= 0x7f800000)": "if (largest > 0x7f800000)"},
            "integers: pairs of wide codes": {"unpacklo_epi32(even, odd)": "unpacklo_epi32(odd, even)"},
            "integers: sums of fours": {"total = _mm_add_epi32(total, four)": "total = four"},
        },
        "_stream.pyx": {
            "rows of a stream: states are put to the first rows": {
                "memcpy(row, rows + k * size, size)": "memcpy(table + k * size, rows + k * size, size)",
            },
            "rows of a stream: from the states of the first rows": {
                "initial = self.next_states if": "initial = self.states if",
            },
            "rows of a stream: given twice": {" or is_named[row]:": ":"},
        },
        "product/integer.pxd": {
            "integers: where pieces of wide rows begin": {"code_bytes(K) + 2 * k if": "code_bytes(K) + k if"},
            "integers: where pieces of panels begin": {"codes + k * lines * LF": "codes + k * LF"},
            "integers: the correction of a piece": {"HEAD_BYTES + k, n": "HEAD_BYTES, n"},
        },
        "product/integer_instructions.h": {
            "integers: rows of the second tile": {"rows -= m, sums += m * ROW_SUMS": "rows -= m, sums += ROW_SUMS"},
            "integers: a last line of half lines": {
                "TILE(3, 2, sums + g * LINE, panel + g * LINE_BYTES,": "TILE(3, 2, sums + g * LINE, panel,",
            },
            "integers: odd codes": {"1, OP(srli_epi16)(codes, 8))": "1, OP(srli_epi16)(codes, 7))"},
            "integers: chains": {"for (int c = 1; c < CHAINS; c++)": "for (int c = 2; c < CHAINS; c++)"},
        },
    }
)

ORDERS = by_name(
    {  # the same for the order of summation
        "product/tile.h": {
            "blocks of 32": {"BLOCK = 64, ROW": "BLOCK = 32, ROW"},
            "blocks of 128": {"BLOCK = 64, ROW": "BLOCK = 128, ROW"},
            "blocks of 128 rows": {"ROW_BLOCK = 256": "ROW_BLOCK = 128"},
            "blocks of 512 rows": {"ROW_BLOCK = 256": "ROW_BLOCK = 512"},
        },
        "product/tile.pxd": {
            "the tile from the last k to the first": {
                "packed_vector(v0 + v, sub, k,": "packed_vector(v0 + v, sub, K - 1 - k,",
                "a, q * rs + k * ks)": "a, q * rs + (K - 1 - k) * ks)",
            },
            "chains that begin with what there is": {
                "acc[q * nv + v] = ZERO": "acc[q * nv + v] = out[q * LINES * VECTORS + v0 + v]",
                "out[q * LINES * VECTORS + v0 + v] + acc[q * nv + v]": "acc[q * nv + v]",
            },
        },
        "product/panels.pxd": {
            "blocks of 32 of weights as they lie": {"BLOCK, K - k)\n        if": "32, K - k)\n        if"},
            "torch blocks of 32": {
                "BLOCK, K - k)\n            pack_transposed": "32, K - k)\n            pack_transposed",
            },
        },
        "product/quantized.pxd": {
            "stored blocks of 32": {
                "BLOCK, K - k0)\n        block_codes = codes + k0 * lines * LF": (
                    "32, K - k0)\n        block_codes = codes + k0 * lines * LF"
                ),
            },
            "stored in registers: from the last k to the first": {
                "i * panel_stride + (k * lines": "i * panel_stride + ((K - 1 - k) * lines",
                "packed_vector(v0 + v, sub, k,": "packed_vector(v0 + v, sub, K - 1 - k,",
                "w[v], a, q * stride + k)": "w[v], a, q * stride + K - 1 - k)",
            },
        },
        "passes/gradients.pxd": {
            "peepholes by 32 rows": {"(r + 1) % BLOCK == 0": "(r + 1) % 32 == 0"},
            "peepholes in blocks of 128": {"(r + 1) % ROW_BLOCK == 0": "(r + 1) % 128 == 0"},
            "biases without blocks of rows": {
                "total[l] = total[l] + chain[l]\n        for": "sums[column + l] += chain[l]\n        for",
            },
        },
    }
)
KERNELS = "tests/kernels/test_kernels.py", "test_formulas and float64 and base"
ORDER = "tests/kernels/test_order.py", "not shows and base"
STORED = "tests/layers/test_quantized.py"
INTEGERS = "tests/layers/test_integers.py"
TESTS = {  # by how the names of mutants begin: a file and which of its tests, at a level that has what is mutated
    "coupled": ("tests/layers/test_layers.py", "(test_values or derivative) and coupled and base"),
    "projected": ("tests/layers/test_layers.py", "(test_values or derivative) and projected and base"),
    "rows of h": ("tests/kernels/test_threads.py", "whole_rows and base"),
    "ragged": ("tests/layers/test_layers_ragged.py", "alone and float64 and base"),
    "reset state": ("tests/layers/test_layers_reset_state.py", "alone and float64 and base"),
    "activations": ("tests/layers/test_layers_activations.py", "formulas and float64 and base"),
    "dense": ("tests/layers/test_dense.py", "test_formulas and float64 and base"),
    "torch": ("tests/torch/test_torch_layout.py", "equals and float64 and base"),
    "stored in registers: loads": (STORED, "test_guards and v3"),
    "stored in registers: two lines": (STORED, "test_calls and v4"),  # at v3 nothing reads the other two
    "stored in registers": (STORED, "test_calls and v3"),
    "stored in panels of two": (STORED, "test_calls and v4"),
    "stored": (STORED, "test_calls and base"),
    "rounded": ("tests/layers/test_quantization.py", "definition or again or scales or largest or cannot or base"),
    "rows of a stream": ("tests/layers/test_stream_rows.py", "alone or wrong or base"),
    "integers: rows": (INTEGERS, "exact or v3"),  # at base twelve rows at most are multiplied at once
    "integers": (INTEGERS, "exact or formulas or finite or base"),
    "panels of two": ("tests/kernels/test_order.py", "test_forward and float32 and v4"),
    "gates that share lines are taken apart in": (
        "tests/kernels/test_kernels.py",
        "test_formulas and float32 and base",
    ),
    "tiles of several lines": ("tests/kernels/test_kernels.py", "test_formulas and float64 and v3"),
    "float16": ("tests/kernels/test_kernels.py", "(test_formulas or repeated) and float16 and base"),
    "lines in place": ("tests/kernels/test_guards.py", "test_ops and float64 and base"),
}


def succeeds(folder: Path, level: str, *command: str) -> bool:
    environment = os.environ | {"BLOCKCELL_LEVELS": level, "BLOCKCELL_LEVEL": level, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True).returncode == 0


def those_for(what: str) -> tuple[str, str]:
    others = ORDER if what in ORDERS else KERNELS
    return next((tests for start, tests in TESTS.items() if what.startswith(start)), others)


def level_of(tests: tuple[str, str]) -> str:
    return tests[1].split()[-1]


def build_and_test(folder: Path, file: str, tests: str) -> bool:
    level = level_of((file, tests))
    assert succeeds(folder, level, "setup.py", "build_ext", "--inplace"), "the mutant does not compile"
    return succeeds(folder, level, "-m", "pytest", "-q", "-x", file, "-k", tests, "-m", "not slow")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that builds fast, and whose tests pass."""
    folder = tmp_path_factory.mktemp("mutants") / "blockcell"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "build", "*.so"))
    setup = folder / "setup.py"
    text = setup.read_text().replace('"-O3"', '"-O1"')
    # With the hash of all sources in its command line, each module would be compiled anew, also by ccache.
    text, count = re.subn(r"source\.stem: source_hash\(source\)", 'source.stem: "mutant"', text)
    assert count == 1
    setup.write_text(text)
    kinds = [KERNELS, ORDER, *(tests for tests in TESTS.values() if level_of(tests) in _cpu.supported_levels())]
    assert all(build_and_test(folder, *tests) for tests in sorted(kinds, key=level_of))
    return folder


def swapped(what: str, source: str) -> str:
    """The mutant."""
    changes = (MUTANTS | ORDERS)[what][1]
    for k, old in enumerate(changes):  # in two steps, so that a swap does not undo itself
        assert old in source, old
        source = source.replace(old, f"@{k}@")
    for k, new in enumerate(changes.values()):
        source = source.replace(f"@{k}@", new)
    return source


@pytest.mark.parametrize("what", MUTANTS | ORDERS)
def test_places(what: str) -> None:
    """What a mutant changes is still there."""
    source = (ROOT / "pyx" / (MUTANTS | ORDERS)[what][0]).read_text()
    assert swapped(what, source) != source


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTANTS | ORDERS)
def test_mutant(what: str, checkout: Path) -> None:
    source = checkout / "pyx" / (MUTANTS | ORDERS)[what][0]
    original, tests = source.read_text(), those_for(what)
    if level_of(tests) not in _cpu.supported_levels():
        pytest.skip(f"this CPU does not run level {level_of(tests)}")
    try:
        source.write_text(swapped(what, original))
        assert not build_and_test(checkout, *tests), "no test sees it"
    finally:
        source.write_text(original)
