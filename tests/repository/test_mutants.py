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
MUTANTS = {  # what is swapped: the source, and what changes, wherever it stands
    "lstm i and f": (
        "cells/lstm.pxd",
        {"cell, i_bar,": "cell, f_bar,", "cell, f_bar,": "cell, i_bar,"},
    ),
    "lstm i and ci": (
        "cells/lstm.pxd",
        {
            "i_bar[l] = z[I_BAR * L + l]": "i_bar[l] = z[CI_BAR * L + l]",
            "cell, z + ci_line * L,": "cell, z + I_BAR * L,",
        },
    ),
    "lstm f and o": (
        "cells/lstm.pxd",
        {"f_line = F_BAR": "f_line = O_BAR", "o_line = O_BAR": "o_line = F_BAR"},
    ),
    "lstm ci and o": (
        "cells/lstm.pxd",
        {"ci_line = CI_BAR": "ci_line = O_BAR", "o_line = O_BAR": "o_line = CI_BAR"},
    ),
    "lstm icfo and ifco": (
        "_ops.pyx",
        {"2 if ifco else 1, 1 if ifco else 2": "1 if ifco else 2, 2 if ifco else 1"},
    ),
    "lstm wci and wcf": (
        "cells/lstm.pxd",
        {
            "cs_state[l] * peep[PEEP_I": "cs_state[l] * peep[PEEP_F",
            "cs_state[l] * peep[PEEP_F": "cs_state[l] * peep[PEEP_I",
        },
    ),
    "lstm wcf and wco": (
        "cells/lstm.pxd",
        {
            "cs_state[l] * peep[PEEP_F": "cs_state[l] * peep[PEEP_O",
            "cs_state[l] * peep[PEEP_O": "cs_state[l] * peep[PEEP_F",
        },
    ),
    "lstm h_prev and cs_prev": (
        "passes/forward.pxd",
        {"inputs[H_PREV], &p.": "inputs[CS_PREV], &p.", "inputs[CS_PREV], &p.": "inputs[H_PREV], &p."},
    ),
    "lstm h and cs": (
        "cells/lstm.pxd",
        {"y[OUT_CS * L + l] = cs": "y[OUT_H * L + l] = cs", "y[OUT_H * L + l] = y": "y[OUT_CS * L + l] = y"},
    ),
    "lstm d_i and d_f": (
        "cells/lstm.pxd",
        {
            "dicfo[I_BAR * L + l] = d_cs": "dicfo[F_BAR * L + l] = d_cs",
            "dicfo[F_BAR * L + l] = d_cs": "dicfo[I_BAR * L + l] = d_cs",
            "cell, i, dicfo + I_BAR": "cell, i, dicfo + F_BAR",
            "cell, f, dicfo + F_BAR": "cell, f, dicfo + I_BAR",
        },
    ),
    "lstm d_ci and d_o": (
        "cells/lstm.pxd",
        {
            "dicfo[O_BAR * L + l] = h_grad": "dicfo[CI_BAR * L + l] = h_grad",
            "dicfo[CI_BAR * L + l] = d_cs": "dicfo[O_BAR * L + l] = d_cs",
        },
    ),
    "lstm h_grad and cs_grad": (
        "cells/lstm.pxd",
        {
            "d_h, inputs[H_GRAD], offset_of(&p.d_y_layout, t, row) + j * L,": "d_h, inputs[CS_GRAD], saved_line,",
            "space[0], inputs[CS_GRAD], saved_line,": "space[0], inputs[H_GRAD], saved_line,",
        },
    ),
    "lstm wci and wcf in the gradient": (
        "cells/lstm.pxd",
        {
            "dicfo[I_BAR * L + l] * peep[PEEP_I": "dicfo[I_BAR * L + l] * peep[PEEP_F",
            "dicfo[F_BAR * L + l] * peep[PEEP_F": "dicfo[F_BAR * L + l] * peep[PEEP_I",
        },
    ),
    "lstm wci_grad and wcf_grad": (
        "cells/lstm.pxd",
        {"grads[WCI], d": "grads[WCF], d", "grads[WCF], d": "grads[WCI], d"},
    ),
    "coupled ci and f": (
        "cells/lstm.pxd",
        {"ci_line = CI_BAR": "ci_line = F_BAR", "f_line = F_BAR": "f_line = CI_BAR"},
    ),
    "coupled i is f": (
        "cells/lstm.pxd",
        {"y[OUT_I * L + l] = one - y[OUT_F * L + l]": "y[OUT_I * L + l] = y[OUT_F * L + l]"},
    ),
    "coupled o is where four gates have it": ("cells/lstm.pxd", {"o_line = O_BAR - lstm.coupled": "o_line = O_BAR"}),
    "coupled d_f without i's part": ("cells/lstm.pxd", {"cs_prev[l] - ci[l] if": "cs_prev[l] if"}),
    "projected from cs": (
        "passes/forward.pxd",
        {"p.start[M if p.c.projects else HR]": "p.start[CS if p.c.projects else HR]"},
    ),
    "projected without its clip": ("cells/lstm.pxd", {"h[l] = -clip if h[l] < -clip else h[l]": "h[l] = h[l]"}),
    "projected: the gradient passes the clip": (
        "cells/lstm.pxd",
        {"h[l] >= clip or h[l] <= -clip": "h[l] > 2 * clip"},
    ),
    "projected: what is carried is left out": (
        "cells/lstm.pxd",
        {"product + (j - j0) * L, d_row +": "scratch + p.start[D_H] + b * p.Ps + j * L, d_row +"},
    ),
    "projected: cs goes past a reset": ("cells/lstm.pxd", {"if has_flag(&p.steps, k, b, RESET):": "if False:"}),
    "projected: the weights' gradient without co": (
        "cells/lstm.pxd",
        {"PEEP_LINES, 6, OUT_CO": "PEEP_LINES, 6, OUT_O"},
    ),
    "rows of h that are stored whole are those of the step before": (
        "passes/forward.pxd",
        {"h_before(p, step.rows, step.k + 1) + b * p.Ps, p.P": "h_before(p, step.rows, step.k) + b * p.Ps, p.P"},
    ),
    "gru r and u": (
        "cells/gru.pxd",
        {
            "cell, z + R_BAR": "cell, z + U_BAR",
            "cell, z + U_BAR": "cell, z + R_BAR",
        },
    ),
    "gru c and h_prev": ("cells/gru.pxd", {"u[l] * (h[l] - c[l]) + c[l]": "u[l] * (c[l] - h[l]) + h[l]"}),
    "gru d_r_bar and d_u_bar": (
        "cells/gru.pxd",
        {
            "d_row + U_BAR * p.H + j * L, d_u_bar": "d_row + R_BAR * p.H + j * L, d_u_bar",
            "d_row + R_BAR * p.H + j * L, d_r_bar": "d_row + U_BAR * p.H + j * L, d_r_bar",
        },
    ),
    "gru r and u in the gradient": (
        "cells/gru.pxd",
        {
            "inputs[OUT_R], saved_line, width)": "inputs[OUT_U], saved_line, width)",
            "inputs[OUT_U], saved_line, width)": "inputs[OUT_R], saved_line, width)",
        },
    ),
    "gates that share lines are taken apart wrongly": (
        "product/panels.pxd",
        {"row[gate * width + l] if": "row[gate * L + l] if"},
    ),
    "gates that share lines are taken apart from the first on": (
        "product/panels.pxd",
        {
            "gate = p.gates - 1\n        while gate >= 0:": "gate = 0\n        while gate < p.gates:",
            "gate -= 1": "gate += 1",
        },
    ),
    "gates that share lines are taken apart in the first line of units": (
        "product/panels.pxd",
        {"row = z + (q * LINES + u * p.gates) * L": "row = z + q * LINES * L"},
    ),
    "gates that share lines are packed side by side": (
        "product/panels.pxd",
        {"g = u * p.gates + l // L": "g = u * p.gates + gate"},
    ),
    "gates that share lines are packed in another order": (
        "product/panels.pxd",
        {"gate_column(p, j, u, gate) + l - l0": "gate_column(p, j, u, p.gates - 1 - gate) + l - l0"},
    ),
    "biases of gates that share lines stand side by side": (
        "product/panels.pxd",
        {"bias + u * p.gates * L + gate * width": "bias + u * p.gates * L + gate * L"},
    ),
    "gates share lines in the first panel": (
        "product/panels.pxd",
        {"if j == p.count - 1 else 0)": "if j == 0 else 0)"},
    ),
    "gates share too few lines": (
        "product/panels.pxd",
        {"(p.J - 1) * L) + L - 1) // L": "(p.J - 1) * L)) // L"},
    ),
    "gates share lines where weights are not packed": (
        "schedule/plan.pxd",
        {"if p.packs_all:\n        compact_gates(": "if True:\n        compact_gates("},
    ),
    "reset after: r and u": (
        "cells/gru_reset_after.pxd",
        {
            "cell, z + R_BAR": "cell, z + U_BAR",
            "cell, z + U_BAR": "cell, z + R_BAR",
        },
    ),
    "reset after: xc and hc": (
        "cells/gru_reset_after.pxd",
        {"= z[XC * L + l] +": "= z[HC * L + l] +", "* z[HC * L + l]": "* z[XC * L + l]"},
    ),
    "reset after: c and h_prev": (
        "cells/gru_reset_after.pxd",
        {
            "(h_prev[l] - y[OUT_C * L + l]) + y[OUT_C * L + l]": "(y[OUT_C * L + l] - h_prev[l]) + h_prev[l]",
        },
    ),
    "reset after: d_r_bar and d_u_bar": (
        "cells/gru_reset_after.pxd",
        {"d[D_U_BAR * L + l] = d_h": "d[D_R_BAR * L + l] = d_h", "d[D_R_BAR * L + l] = d": "d[D_U_BAR * L + l] = d"},
    ),
    "reset after: d_c_bar and d_hc": (
        "cells/gru_reset_after.pxd",
        {"d[D_C_BAR * L + l] = d": "d[D_HC * L + l] = d", "d[D_HC * L + l] = d": "d[D_C_BAR * L + l] = d"},
    ),
    "reset after: gates share lines": ("product/panels.pxd", {"if p.J > 0 and not p.separate:": "if p.J > 0:"}),
    "reset after: b_c for b_hc": ("product/panels.pxd", {"at(b[MATRICES], j": "at(b[1], j"}),
    "reset after: b_c_grad for b_hc_grad": ("passes/backward.pxd", {"<real> sums_h[l]": "<real> sums[l]"}),
    "reset after: d_c_bar for d_hc": (
        "passes/backward.pxd",
        {"*d_h = p.scratch + p.start[D] + p.h_column[n]": "*d_h = p.scratch + p.start[D] + p.column[n]"},
    ),
    "rnn: the slope at the gradient": (
        "cells/rnn.pxd",
        {"slope(&p.c.activation, h, s)": "slope(&p.c.activation, d_h, s)"},
    ),
    "rnn: one state for two steps": (
        "schedule/plan.pxd",
        {"> 1:\n        p.start[H_ODD]": "> 0:\n        p.start[H_ODD]"},
    ),
    "rnn: units of the panel before": (
        "cells/rnn.pxd",
        {"((b - b0) * LINES + unit_line) * L, h)": "(b - b0) * LINES * L, h)"},
    ),
    "activations: tanh's for sigmoid's": ("cells/activations.pxd", {"cell).recurrent\n": "cell).activation\n"}),
    "activations: sigmoid's for tanh's": ("cells/activations.pxd", {"cell).activation\n": "cell).recurrent\n"}),
    "activations: of c for that of u in a GRU": ("cells/gru.pxd", {"grad(cell, u,": "grad(cell, c,"}),
    "activations: c before its reset": (
        "cells/gru_reset_after.pxd",
        {"state(cell, c_bar,": "state(cell, z + XC * L,"},
    ),
    "activations: scale and shift": ("cells/activations.pxd", {"v = a * z[l] + b\n": "v = b * z[l] + a\n"}),
    "activations: elu's slope without alpha": ("cells/activations.pxd", {"v = y[l] + a\n": "v = y[l]\n"}),
    "activations: the default for another one": (
        "cells/activations.pxd",
        {"if f.number != SIGMOID:": "if f.number == RELU:", "if f.number != TANH:": "if f.number == RELU:"},
    ),
    "dense sigmoid and tanh": (
        "cells/dense.pxd",
        {"z[l] = sigmoid(z[l])": "z[l] = tanh(z[l])", "z[l] = tanh(z[l])": "z[l] = sigmoid(z[l])"},
    ),
    "torch w_hh from the start": ("product/panels.pxd", {"column * p.R + k - p.I": "column * p.R + k"}),
    "torch w_ih for w_hh in the gradient": (
        "passes/backward.pxd",
        {"(W if of_x else W_H) + n], first": "W + n], first"},
    ),
    "torch d_c_bar for d_hc": ("passes/backward.pxd", {"H_TILES if p.separate[n] else X_TILES": "X_TILES"}),
    "torch x_grad that is not added": ("passes/gradients.pxd", {"before[l] + sums[l]": "sums[l]"}),
    "torch gates that share lines are packed from one column": (
        "product/panels.pxd",
        {"column // width) + column % width": "column // width)"},
    ),
    "torch w_h for w_x that is not packed": (
        "product/panels.pxd",
        {"add_transposed_product(p, w, True, product, j,": "add_transposed_product(p, w, False, product, j,"},
    ),
    "torch columns of d_c_bar for those of d_hc": (
        "passes/backward.pxd",
        {"at(rows[q].values, p.h_column[n] - p.column[n])": "rows[q].values"},
    ),
    "torch y without gaps": (
        "passes/backward.pxd",
        {"                                          &p.h_layout, t, row)": "&p.cs_layout, t, row)"},
    ),
    "dense relu left out": ("cells/dense.pxd", {"z[l] = 0 if z[l] < 0 else z[l]": "z[l] = z[l]"}),
    "dense softmax of what is beyond a row": ("cells/dense.pxd", {"z[l] = -INFINITY": "z[l] = 0"}),
    "dense sigmoid and tanh in the gradient": (
        "cells/dense.pxd",
        {
            "d[l] * y[l] * (one - y[l])": "d[l] * (one - y[l] * y[l])",
            "d[l] * (one - y[l] * y[l])": "d[l] * y[l] * (one - y[l])",
        },
    ),
    "integers: scales of x for h": ("product/panels.pxd", {"line += p.separate": "line += 0"}),
    "stored lines of x for h": (
        "product/panels.pxd",
        {"gate_lane(p, j, u, gate, k < p.I))": "gate_lane(p, j, u, gate, True))"},
    ),
    "integers: scales of h for x": (
        "product/panels.pxd",
        {"p.separate * L + gate_lane(p, j, u, gate, False)": "p.separate * L + gate_lane(p, j, u, gate, True)"},
    ),
    "stored gates that share lines": (
        "product/panels.pxd",
        {"u * p.gates * L + gate * columns_left(p, j, u)": "(u * p.gates + gate) * L"},
    ),
    "stored biases begin in the last line of weights": (
        "product/panels.pxd",
        {"bytes_per_weight(p.format) + 63) // 64": "bytes_per_weight(p.format)) // 64"},
    ),
    "stored in registers: half of another vector": (
        "product/quantized.pxd",
        {"(v0 + v) % VECTORS)": "v % VECTORS)"},
    ),
    "stored in registers: vectors from another one on": (
        "product/quantized.pxd",
        {"float16_tile(rows, 1, 3, 3, lines": "float16_tile(rows, 1, 2, 3, lines"},
    ),
    "stored in registers: blocks for the other rows": (
        "product/quantized.pxd",
        {"block[packed_vector(v0 + v,": "block[packed_vector(v0 // sub * sub + (v0 + v) % sub,"},
    ),
    "stored in registers: two lines as four": ("product/quantized.pxd", {"(lines >= 3 or": "(lines >= 2 or"}),
    "stored in registers: loads past the last panel": (
        "product/quantized.pxd",
        {
            "prefetch_read(prefetch + k * LINE_BYTES)": (
                "acc[0] = acc[0] + (<const float *> (prefetch + k * LINE_BYTES))[0] * <float> 0"
            )
        },
    ),
    "stored in panels of two: one place for both": ("product/quantized.pxd", {"codes + i * panel_stride +": "codes +"}),
    "stored in panels of two: of other numbers of lines": (
        "product/panels.pxd",
        {" or ((p.format != UNQUANTIZED or lines < LINES) and lines_in_panel(p, j + most - 1) < lines):": ":"},
    ),
    "panels of two: one more than there are": (
        "product/panels.pxd",
        {"if j + most > end or (": "if j + most > end + 1 or ("},
    ),
    "panels of two: the wrong one is taken apart": (
        "passes/forward.pxd",
        {"expand_gates(w, i - 1, 1, panel_sums + (count - 1) * z_panel)": "expand_gates(w, i - 1, 1, panel_sums)"},
    ),
    "panels of two: rows of h as far apart as those of x": (
        "product/panels.pxd",
        {"p.size - k0 * (lines - last_lines) * L, K)": "p.size, K)"},
    ),
    "panels of two: blocks as far apart as the first": (
        "product/tile.pxd",
        {"panel_stride -= kb * (lines - last_lines) * L": "pass"},
    ),
    "panels of two: as many lines in the last": (
        "product/panels.pxd",
        {"last_lines = lines_in_panel(p, j + panels - 1)": "last_lines = lines"},
    ),
    "rounded to int8 toward zero": (QUANTIZATION, {"np.rint(weights / scale)": "np.trunc(weights / scale)"}),
    "rounded to int8 with one scale for all columns": (
        QUANTIZATION,
        {"np.abs(array).max(axis=0, initial=0)": "np.full(array.shape[1], np.abs(array).max(initial=0))"},
    ),
    "rounded to int8 with scales of zero": (
        QUANTIZATION,
        {"LEAST_SCALE, MOST_SCALE)\n": "np.float32(1e-45), MOST_SCALE)\n"},
    ),
    "rounded to int8 with infinite weights": (QUANTIZATION, {"LEAST_SCALE, MOST_SCALE)\n": "LEAST_SCALE, np.inf)\n"}),
    "tiles of several lines: from another vector on": (
        "product/tile.pxd",
        {"tile(4, 1, 3, VECTORS,": "tile(4, 0, 3, VECTORS,"},
    ),
    "tiles of several lines: of one line": (
        "product/tile.pxd",
        {"block[packed_vector(v0 + v,": "block[packed_vector(v0 // sub * sub + (v0 + v) % sub,"},
    ),
    "lines in place past the end of an array": ("product/lines.pxd", {"n >= L and": "n >= 0 and"}),
    "float16: states are not rounded": ("passes/outputs.pxd", {"if p.c.is_half:": "if False:"}),
    "float16: gradients of weights are summed where they are stored": (
        "passes/backward.pxd",
        {"    if holds_half(p.grads[W]):\n        return": "    if False:\n        return"},
    ),
    "weight gradients without the factor of the second product": (
        "schedule/plan.pxd",
        {"c.traits.factor if n == 1 and c.products > 1 else 0": "0"},
    ),
    "ragged runs of rows across the end of a chain": (
        "passes/gradients.pxd",
        {"min(<Py_ssize_t> PACK_ROWS, block.count[run.chain] - run.r)": "<Py_ssize_t> PACK_ROWS"},
    ),
    "lines of the first state alone": (
        "passes/gradients.pxd",
        {"space, state, j * L, n)": "space, state, 0, n)"},
    ),
    "torch bias sums of the first columns": (
        "passes/gradients.pxd",
        {"block.d_row[k] * ldd + column": "block.d_row[k] * ldd"},
    ),
    "ragged rows in the slots of others": ("passes/steps.pxd", {"s.slots[b].row\n": "b\n"}),
    "ragged rows that end a step early": (
        "passes/steps.pxd",
        {"s.slots[middle].length > t": "s.slots[middle].length > t + 1"},
    ),
    "ragged states of the last step of all": (
        "passes/steps.pxd",
        {"s.T if s.reverse or length_of(s, b) == 0": "s.T if True"},
    ),
    "ragged gradients of the row, not of its slot": (
        "passes/gradients.pxd",
        {"t, row, t * s.B + slot_of_row(s, row)": "t, row, t * s.B + row"},
    ),
    "reset state: that of the step before": (
        "passes/outputs.pxd",
        {"reset_row(reset, step_at(&p.steps, k + 1), row": "reset_row(reset, step_at(&p.steps, k), row"},
    ),
    "reset state: h for cs": ("passes/arrays.pxd", {"array_of(a.reset_state[1]": "array_of(a.reset_state[0]"}),
    "reset state: no gradient": ("passes/steps.pxd", {"if reset.grads.data is not NULL:": "if False:"}),
    "reset state: its gradient goes on": ("passes/steps.pxd", {"clear(grad, L)": "pass"}),
    "reset state: zeros in the weights' gradients": (
        "passes/steps.pxd",
        {"return reset_row(reset, t, row)": "return no_array()"},
    ),
    "dense relu left out of the gradient": ("cells/dense.pxd", {"d[l] if y[l] > 0 else 0": "d[l]"}),
    "dense softmax without its sum in the gradient": (
        "cells/dense.pxd",
        {"y[j * L + l] * (d[j * L + l] - total)": "y[j * L + l] * d[j * L + l]"},
    ),
    "integers: top": ("product/integer.h", {"scale /= 127.0f": "scale /= 128.0f"}),
    "integers: no least scale": ("product/integer.h", {"scale > 0x1p-126f ? scale : 0x1p-126f": "scale"}),
    "integers: infinity": ("product/integer.h", {"if (largest >= 0x7f800000)": "if (largest > 0x7f800000)"}),
    "rows of a stream: states are put to the first rows": (
        "_stream.pyx",
        {"memcpy(row, rows + k * size, size)": "memcpy(table + k * size, rows + k * size, size)"},
    ),
    "rows of a stream: from the states of the first rows": (
        "_stream.pyx",
        {"initial = self.next_states if": "initial = self.states if"},
    ),
    "rows of a stream: given twice": ("_stream.pyx", {" or is_named[row]:": ":"}),
    "integers: pairs of wide codes": ("product/integer.h", {"unpacklo_epi32(even, odd)": "unpacklo_epi32(odd, even)"}),
    "integers: sums of fours": ("product/integer.h", {"total = _mm_add_epi32(total, four)": "total = four"}),
    "integers: where pieces of wide rows begin": (
        "product/integer.pxd",
        {"code_bytes(K) + 2 * k if": "code_bytes(K) + k if"},
    ),
    "integers: where pieces of panels begin": ("product/integer.pxd", {"codes + k * lines * LF": "codes + k * LF"}),
    "integers: the correction of a piece": ("product/integer.pxd", {"sizeof(RowHead) + k, n": "sizeof(RowHead), n"}),
    "integers: rows that end in a tile": ("product/integer_instructions.h", {"m = rows < 16 ? rows : 16;": "m = 16;"}),
    "integers: a last line of half lines": (
        "product/integer_instructions.h",
        {"TILE(3, 2, sums + g * LINE, panel + g * LINE_BYTES,": "TILE(3, 2, sums + g * LINE, panel,"},
    ),
    "integers: odd codes": (
        "product/integer_instructions.h",
        {"1, OP(srli_epi16)(codes, 8))": "1, OP(srli_epi16)(codes, 7))"},
    ),
    "integers: chains": (
        "product/integer_instructions.h",
        {"for (int c = 1; c < CHAINS; c++)": "for (int c = 2; c < CHAINS; c++)"},
    ),
}

ORDERS = {  # the same for the order of summation
    "blocks of 32": ("product/tile.h", {"BLOCK = 64, ROW": "BLOCK = 32, ROW"}),
    "blocks of 128": ("product/tile.h", {"BLOCK = 64, ROW": "BLOCK = 128, ROW"}),
    "blocks of 128 rows": ("product/tile.h", {"ROW_BLOCK = 256": "ROW_BLOCK = 128"}),
    "blocks of 512 rows": ("product/tile.h", {"ROW_BLOCK = 256": "ROW_BLOCK = 512"}),
    "the tile from the last k to the first": (
        "product/tile.pxd",
        {
            "packed_vector(v0 + v, sub, k,": "packed_vector(v0 + v, sub, K - 1 - k,",
            "a, q * rs + k * ks)": "a, q * rs + (K - 1 - k) * ks)",
        },
    ),
    "chains that begin with what there is": (
        "product/tile.pxd",
        {
            "acc[q * nv + v] = ZERO": "acc[q * nv + v] = out[q * LINES * VECTORS + v0 + v]",
            "out[q * LINES * VECTORS + v0 + v] + acc[q * nv + v]": "acc[q * nv + v]",
        },
    ),
    "blocks of 32 of weights as they lie": (
        "product/panels.pxd",
        {"BLOCK, K - k)\n        if": "32, K - k)\n        if"},
    ),
    "stored blocks of 32": (
        "product/quantized.pxd",
        {
            "BLOCK, K - k0)\n        block_codes = codes + k0 * lines * LF": (
                "32, K - k0)\n        block_codes = codes + k0 * lines * LF"
            )
        },
    ),
    "stored in registers: from the last k to the first": (
        "product/quantized.pxd",
        {
            "i * panel_stride + (k * lines": "i * panel_stride + ((K - 1 - k) * lines",
            "packed_vector(v0 + v, sub, k,": "packed_vector(v0 + v, sub, K - 1 - k,",
            "w[v], a, q * stride + k)": "w[v], a, q * stride + K - 1 - k)",
        },
    ),
    "torch blocks of 32": (
        "product/panels.pxd",
        {"BLOCK, K - k)\n            pack_transposed": "32, K - k)\n            pack_transposed"},
    ),
    "peepholes by 32 rows": ("passes/gradients.pxd", {"(r + 1) % BLOCK == 0": "(r + 1) % 32 == 0"}),
    "peepholes in blocks of 128": ("passes/gradients.pxd", {"(r + 1) % ROW_BLOCK == 0": "(r + 1) % 128 == 0"}),
    "biases without blocks of rows": (
        "passes/gradients.pxd",
        {
            "total[l] = total[l] + chain[l]\n        for": "sums[column + l] += chain[l]\n        for",
        },
    ),
}
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
