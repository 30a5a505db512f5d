"""The forms of the LSTM's graphs on onnxruntime's CPU provider, beside its own LSTM and a plain gradient by hand.

    python benchmarks/onnx_forms.py [--sizes 128x1 128x16] [--steps 100] [--threads 1] [--rounds 9] [--csv FILE]

Forward: BlockLSTM with all seven outputs, in every form, against onnxruntime's LSTM node, which gives h alone.
Backward: BlockLSTMGrad against `HAND`, a graph as one would write it for one configuration: hoisted, in a Scan, without
seq_len_max, peephole and clip. Every candidate lives in a process of its own and they are asked in turn; a round runs
for about 0.3 s and gives the median time of a call with bound inputs and outputs; a ratio is the median of the rounds'
ratios. Rounds on a disturbed machine are repeated (turns.py). Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from turns import Worker, answer, counted, seconds, watch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]
NATIVE, GRADIENT = "native LSTM node, h only", "gradient by hand"
CANDIDATES = {  # a name: the op, and what build is told
    NATIVE: ("BlockLSTM", {}),
    "scan": ("BlockLSTM", {"loop": "scan"}),
    "scan, static": ("BlockLSTM", {"loop": "scan", "static": True}),
    "loop": ("BlockLSTM", {"loop": "loop"}),
    "unroll": ("BlockLSTM", {"loop": "unroll"}),
    "native and the rest": ("BlockLSTM", {"loop": "native"}),
    GRADIENT: ("BlockLSTMGrad", {}),
    "gradient, scan": ("BlockLSTMGrad", {"loop": "scan"}),
    "gradient, scan, static": ("BlockLSTMGrad", {"loop": "scan", "static": True}),
    "gradient, loop": ("BlockLSTMGrad", {"loop": "loop"}),
    "gradient, unroll": ("BlockLSTMGrad", {"loop": "unroll"}),
}
HEADER = '<ir_version: 8, opset_import: ["" : 18]>'
LSTM = """
g (float[T,B,I] x, float[1,G,I] W, float[1,G,K] R, float[1,D] bias, float[1,B,K] h_0, float[1,B,K] c_0)
    => (float[T,E,B,K] Y) {
    Y = LSTM <hidden_size = HIDDEN> (x, W, R, bias, , h_0, c_0)
}"""
STATES = "i cs f o ci co h cs_grad h_grad".split()
HAND = f"""
g (float[T,B,I] x, float[B,H] cs_prev, float[B,H] h_prev, float[R,G] w, {
    ", ".join(f"float[T,B,H] {s}" for s in STATES)
})
    => (float[T,B,I] x_grad, float[B,H] cs_prev_grad, float[B,H] h_prev_grad, float[R,G] w_grad, float[G] b_grad) {{
    one = Constant <value = float {{1}}> ()
    start = Constant <value = int64[1] {{0}}> ()
    end = Constant <value = int64[1] {{-1}}> ()
    least = Constant <value = int64[1] {{-2147483648}}> ()
    inputs = Shape <start = 2> (x)
    rows = Shape <end = 1> (w)
    w_x = Slice (w, start, inputs, start)
    w_h = Slice (w, inputs, rows, start)
    w_x_T = Transpose <perm = [1, 0]> (w_x)
    w_h_T = Transpose <perm = [1, 0]> (w_h)
    cs_first = Unsqueeze (cs_prev, start)
    cs_rest = Slice (cs, start, end, start)
    cs_before = Concat <axis = 0> (cs_first, cs_rest)
    h_first = Unsqueeze (h_prev, start)
    h_rest = Slice (h, start, end, start)
    h_before = Concat <axis = 0> (h_first, h_rest)
    co_2 = Mul (co, co)
    co_slope = Sub (one, co_2)
    a = Mul (o, co_slope)
    i_not = Sub (one, i)
    i_slope = Mul (i, i_not)
    to_i = Mul (i_slope, ci)
    ci_2 = Mul (ci, ci)
    ci_slope = Sub (one, ci_2)
    to_ci = Mul (ci_slope, i)
    f_not = Sub (one, f)
    f_slope = Mul (f, f_not)
    to_f = Mul (f_slope, cs_before)
    o_not = Sub (one, o)
    o_slope = Mul (o, o_not)
    to_o = Mul (o_slope, co)
    {
    '''
    '''.join(
        f"{s}_r = Slice ({s}, end, least, start, end)"
        for s in ["a", "to_i", "to_ci", "to_f", "to_o", "f", *STATES[-2:]]
    )
}
    state = Shape (h_prev)
    zeros = ConstantOfShape (state)
    cs_prev_grad, h_prev_grad, d_r = Scan <num_scan_inputs = 8, body = step (float[] d_cs_next, float[] d_h_next,
        float[] a_t, float[] i_t, float[] ci_t, float[] f_t, float[] o_t, float[] keep, float[] cs_t, float[] h_t)
        => (float[] d_cs_prev, float[] d_h_prev, float[] d) {{
            d_h = Add (h_t, d_h_next)
            d_cs_0 = Add (cs_t, d_cs_next)
            d_cs_1 = Mul (d_h, a_t)
            d_cs = Add (d_cs_0, d_cs_1)
            d_i = Mul (d_cs, i_t)
            d_ci = Mul (d_cs, ci_t)
            d_f = Mul (d_cs, f_t)
            d_o = Mul (d_h, o_t)
            d = Concat <axis = -1> (d_i, d_ci, d_f, d_o)
            d_cs_prev = Mul (d_cs, keep)
            d_h_prev = MatMul (d, w_h_T)
        }}> (zeros, zeros, a_r, to_i_r, to_ci_r, to_f_r, to_o_r, f_r, cs_grad_r, h_grad_r)
    d_all = Slice (d_r, end, least, start, end)
    x_grad = MatMul (d_all, w_x_T)
    x_h = Concat <axis = -1> (x, h_before)
    x_h_rows = Flatten <axis = -1> (x_h)
    d_rows = Flatten <axis = -1> (d_all)
    w_grad = Gemm <transA = 1> (x_h_rows, d_rows)
    b_grad = ReduceSum <keepdims = 0> (d_rows, start)
}}"""


def model_and_feeds(candidate: str, sizes: dict[str, int]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    from cases import arguments

    import onnx_export

    op, options = CANDIDATES[candidate]
    args = arguments(op, sizes, use_peephole=False, cell_clip=0.0)
    if candidate == NATIVE:
        H, I = sizes["H"], sizes["I"]  # noqa: E741
        args |= {"W": args["w"][None, :I].transpose(0, 2, 1), "R": args["w"][None, I:].transpose(0, 2, 1)}
        args |= {"bias": np.zeros((1, 8 * H), np.float32), "h_0": args["h_prev"][None], "c_0": args["cs_prev"][None]}
        model = onnx.parser.parse_model(HEADER + LSTM.replace("HIDDEN", str(H)))
    elif candidate == GRADIENT:
        model = onnx.parser.parse_model(HEADER + HAND)
    else:
        attrs = {"use_peephole": False} | ({"cell_clip": 0.0} if op == "BlockLSTM" else {})
        fixed = sizes if options["loop"] in ("unroll", "native") else None
        model = onnx_export.build(op, attrs=attrs, sizes=fixed, **options)
    return model, {value.name: np.ascontiguousarray(args[value.name]) for value in model.graph.input}


def worker(candidate: str, threads: int) -> None:
    """Answers sizes with a call's time in seconds."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    ready: dict[str, Callable[[], object]] = {}

    def reply(sizes: dict[str, int]) -> float:
        key = repr(sizes)
        if key not in ready:
            model, feeds = model_and_feeds(candidate, sizes)
            session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            bound = session.io_binding()
            for name, array in feeds.items():
                bound.bind_cpu_input(name, array)
            for value in session.get_outputs():
                bound.bind_output(value.name, "cpu")
            ready[key] = lambda: (session.run_with_iobinding(bound), feeds)  # which have to live on
            for _ in range(5):
                ready[key]()
        return seconds(ready[key])

    answer(reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128x1", "128x16"], help="H x B, with I = H (128x1 128x16)")
    parser.add_argument("--steps", type=int, default=100, help="T (100)")
    parser.add_argument("--threads", type=int, default=1, help="onnxruntime's threads (1)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per point (9)")
    parser.add_argument("--csv", help="also write the points to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.threads)

    workers = {name: Worker(__file__, "--worker", name, "--threads", str(options.threads)) for name in CANDIDATES}
    for name, process in workers.items():
        if process.missing:
            sys.exit(f"{name} does not run here: {process.missing}")
    rows, guard = [], watch(workers.values())

    def ask(sizes: dict[str, int]) -> dict[str, float]:
        return {name: process.ask(sizes) for name, process in workers.items()}

    for point in options.sizes:
        H, B = map(int, point.split("x"))
        sizes = {"T": options.steps, "B": B, "I": H, "H": H}
        rounds = counted(guard.rounds(options.threads, partial(ask, sizes), options.rounds))
        for name, (op, _) in CANDIDATES.items():
            peer = NATIVE if op == "BlockLSTM" else GRADIENT
            step = statistics.median(times[name] for times in rounds) / options.steps * 1e6
            ratio = statistics.median(times[name] / times[peer] for times in rounds)
            rows.append([options.steps, B, H, options.threads, name, round(step, 2), round(ratio, 2)])
            print(f"T{options.steps} B{B} H{H} {options.threads} thread(s) {name:28}{step:9.1f} us/step{ratio:7.2f}x")
    for process in workers.values():
        process.close()
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([["T", "B", "H", "threads", "form", "us_per_step", "ratio"], *rows])


if __name__ == "__main__":
    main()
