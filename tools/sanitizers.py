"""Build and run the native code under AddressSanitizer and UndefinedBehaviorSanitizer, or under ThreadSanitizer.

    python tools/sanitizers.py memory       (needs gcc)
    python tools/sanitizers.py threads      (needs gcc and LLVM's libomp)

A copy of the checkout in build/ is built with the sanitizers, for every CPU level.  Faults are planted there, each of
which must be found, or nothing would be learned; then the tests run, where nothing may be found.  Every barrier is such
a fault: ThreadSanitizer must see when any one of them is left out, but for those in SPARE.

Run by `make test-all`, by CI weekly, and by hand after a change of native code.  `threads` takes a quarter of an hour
to half an hour on two cores, and `memory`, whose sanitizer slows most tests of native code down, 40 to 70 minutes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from children import ROOT, copy_checkout, last_line, run, run_successfully

TESTED = ["kernels/*", "layers/*", "ops/*", "torch/test_torch_layout.py"]
EXCLUDED = {
    "kernels/test_dispatch.py": "runs no kernel, but interpreters with other environments",
    "kernels/test_formulas.py": "runs no native code",
    "kernels/test_object_code.py": "reads the instructions of modules without sanitizers",
    "kernels/test_workspaces.py": "watches workspaces by Python's allocator, as workspaces.py does by zones",
    "layers/test_files.py": "runs no kernel, and limits memory, of which the sanitizer takes terabytes",
    "layers/test_scorer.py": "starts processes; a scorer runs the kernels of layers that it is given",
    "ops/test_against_tensorflow.py": "compares with TensorFlow",
    "ops/test_memory.py": "counts memory that the C library has given out",
}
# For pytest's -k: one test takes the same ways a million times, two count memory that the C library has given out, one
# has it fill this memory.
TEST_SELECTION = "not million_steps and not idle_threads and not what_is_kept and not depend_on_their_inputs_alone"
INSTALL = "apt-get install gcc libomp-dev"

# ------------------------------------------------------------------------------------------------------ planted faults
OVERFLOWING = """

def overflowing(int x):
    return x + 1
"""
MEMORY_FAULTS = {  # calls, and what the sanitizer says of them
    "a number read past the end of an array": (
        "kernels.activate(longer(np.ones(1000, np.float32), (1001,)), np.ones(1001, np.float32), (0, 0, 0))",
        "heap-buffer-overflow",
    ),
    "a number written past the end of an array": (
        "kernels.activate(np.ones(1001, np.float32), longer(np.ones(1000, np.float32), (1001,)), (0, 0, 0))",
        "heap-buffer-overflow",
    ),
    "a signed overflow": ("kernels.overflowing(2**31 - 1)", "signed integer overflow"),
}
MEMORY_FAULT = """
import importlib
import numpy as np
from blockcell import _kernels
longer = np.lib.stride_tricks.as_strided
kernels = importlib.import_module("blockcell._for_tests_float_{level}")
{call}
"""
DRAWN_CALLS = 3  # calls of each kind at a level
# A call of a barrier in the source of a kernel.
BARRIER = re.compile(r"^( +)((?:group_)?barrier\(&team\).*)$", re.MULTILINE)
FAMILIES = {"lstm_cell_grad.pxd": "lstm", "dense.pxd": "dense"}  # whose kernels alone have the barriers of a file
# Barriers whose removal goes unnoticed, as nothing that follows reads what another thread wrote before them: the file,
# the function, and how many it has.
SPARE = {
    "lstm_cell_grad.pxd compute_dicfo": 1,
    # The last one, and the one after `single_step_grads`, which orders nothing today: a single step that packs panel by
    # panel has one group, or is a GRU's, whose weight gradients read d only after the next barrier. It stays so that a
    # cell with other reads is right.
    "backward.pxd backward": 2,
    "forward.pxd forward": 1,
    "dense.pxd forward": 1,
    "dense.pxd backward": 1,
}
REACHED = "left out a barrier"
LEFT_OUT_PXD = f'''"""Whether the environment says to leave out the barrier of this number."""

cdef extern from *:
    """
    #include <stdlib.h>
    #include <unistd.h>
    static int number_left_out, was_reached;
    __attribute__((constructor)) static void read_number_left_out(void) {{
        const char *value = getenv("BARRIER_LEFT_OUT");
        number_left_out = value ? atoi(value) : -1;
    }}
    static inline int left_out(int number) {{
        if (number != number_left_out)
            return 0;
        if (!__atomic_exchange_n(&was_reached, 1, __ATOMIC_RELAXED))
            (void) !write(2, "{REACHED}", {len(REACHED)});
        return 1;
    }}
    """
    bint left_out(int number) noexcept nogil
'''
SHARED_OUTPUT = """  # Python threads whose calls write to the same array
import threading
import numpy as np
from cases import arguments
from kernel_cases import run
from blockcell import raw_ops
args = arguments("BlockLSTM", {"T": 20, "B": 16, "I": 32, "H": 32}, use_peephole=False)
out = tuple(raw_ops.BlockLSTM(**args))
gate = threading.Barrier(2)
def calls():
    gate.wait()
    for _ in range(50):
        raw_ops.BlockLSTM(**args, out=out, num_threads=1)
threads = [threading.Thread(target=calls) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
RACE = "WARNING: ThreadSanitizer: data race"
OUT_OF_BOUNDS = "ERROR: AddressSanitizer: "


def find_test_files(checkout: Path) -> list[str]:
    """Return the paths of all tests of native code but those that EXCLUDED gives a reason for."""
    tests = checkout / "tests"
    names = [str(path.relative_to(tests)) for pattern in TESTED for path in sorted(tests.glob(pattern))]
    assert EXCLUDED.keys() <= {*names}, "a file that is excluded is not there any more"
    return [f"tests/{name}" for name in names if "/test_" in name and name not in EXCLUDED]


# --------------------------------------------------------------------------------------------------------------- build
def copy_source(name: str) -> Path:
    """Copy the checkout into a folder of build/ that is new, and return that.

    The copy compiles fast, and stacks have line numbers."""
    folder = ROOT / "build" / name
    shutil.rmtree(folder, ignore_errors=True)
    copy_checkout(folder)
    setup = folder / "setup.py"
    text = setup.read_text()
    for option, replacement in (('"-O3"', '"-O1"'), ('"-g0"', '"-g1"')):
        assert text.count(option) == 1, option
        text = text.replace(option, replacement)
    setup.write_text(text)
    return folder


def build(folder: Path, flags: str, mark: bytes) -> str:
    """Build a copy in place, and check that every module was compiled with the sanitizers; return a line about it."""
    start = time.perf_counter()
    # As part of CC they are there too when setup.py links its probe of OpenMP; nothing in that is of interest.
    # Where overflow wraps, as Python's own flags say, it is not reported.
    quiet = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "report_bugs=0"}
    environment = os.environ | quiet | {"CC": f"gcc {flags}", "CFLAGS": "-fno-omit-frame-pointer -fno-wrapv"}
    environment.pop("BLOCKCELL_LEVELS", None)
    command = sys.executable, "setup.py", "build_ext", "--inplace"
    run_successfully(*command, cwd=folder, environment=environment, hint=f"; {INSTALL}, where these are missing")
    modules = list((folder / "blockcell").glob("*.so"))
    assert modules
    for module in modules:
        assert mark in module.read_bytes(), f"{module.name} was built without the sanitizer"
    return f"{len(modules)} modules built with {flags} in {time.perf_counter() - start:.0f} s"


def library_path(name: str) -> Path:
    """Return the path of a library of gcc's."""
    path = Path(subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip())
    if not path.is_absolute():
        sys.exit(f"there is no {name}: {INSTALL}")
    return path.resolve()


class Sanitized:
    """A checkout that was built with sanitizers, and the environment in which its tests run."""

    def __init__(self, folder: Path, **environment: str) -> None:
        """Keep the environment, and check that the copy was built with OpenMP."""
        self.folder = folder
        self.environment = (
            os.environ | {"PYTHONPATH": f"{folder}:{folder}/tests/lib", "PYTHONMALLOC": "malloc"} | environment
        )
        self.environment.pop("BLOCKCELL_LEVEL", None)
        info = "from blockcell import build_info; print(*build_info()['levels'], build_info()['openmp'])"
        *self.levels, openmp = self.run_successfully("-c", info).split()
        assert openmp == "True", "built without OpenMP"

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run this Python with arguments in the copy, and capture what it prints."""
        return run(sys.executable, *arguments, cwd=self.folder, environment=self.environment, **environment)

    def expect_report(self, fault: str, words: str, *arguments: str, **environment: str) -> None:
        """Run Python with arguments; exit unless it fails with these words of a sanitizer's."""
        result = self.run(*arguments, **environment)
        if result.returncode == 0 or words not in result.stdout:
            sys.exit(f"{result.stdout[-10000:]}\nnot found: {fault}")

    def run_successfully(self, *arguments: str, **environment: str) -> str:
        """Run Python with arguments, exit if it fails, and return the last line that it prints."""
        command = sys.executable, *arguments
        return last_line(run_successfully(*command, cwd=self.folder, environment=self.environment, **environment))


# ---------------------------------------------------------------------------------------------------------------- runs
def check_memory() -> None:
    """Find planted faults and regions of workspaces that are too short; then run drawn calls and tests."""
    folder = copy_source("asan")
    kernels = folder / "pyx" / "_for_tests.pyx"
    kernels.write_text(kernels.read_text() + OVERFLOWING)
    print(build(folder, "-fsanitize=address,undefined -DRED_ZONES", b"__asan_init"), flush=True)
    sanitized = Sanitized(
        folder,
        LD_PRELOAD=f"{library_path('libasan.so')} {library_path('libstdc++.so')}",
        # Some versions of gcc align what they keep for use-after-return too little for the widest registers.
        ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:allocator_may_return_null=1:detect_stack_use_after_return=0",
        UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1",
    )
    for level in sanitized.levels:
        for fault, (call, words) in MEMORY_FAULTS.items():
            sanitized.expect_report(f"{fault}, {level}", words, "-c", MEMORY_FAULT.format(level=level, call=call))
    print(f"{len(MEMORY_FAULTS)} planted faults found at levels {', '.join(sanitized.levels)}", flush=True)
    regions = json.loads(sanitized.run_successfully("tools/workspaces.py", "regions"))
    for plan, names in regions.items():
        sanitized.run_successfully("tools/workspaces.py", plan)
        for name in names:
            short = {"SHORT_REGION": name}
            sanitized.expect_report(f"{name} of {plan} is short", OUT_OF_BOUNDS, "tools/workspaces.py", plan, **short)
    print(f"{sum(map(len, regions.values()))} regions of workspaces that are too short found", flush=True)
    seed = secrets.randbits(32)
    print(f"seed of drawn calls: {seed}", flush=True)
    for level in sanitized.levels:
        print(
            sanitized.run_successfully(
                "tools/workspaces.py", "draw", str(seed), f"0:{DRAWN_CALLS}", BLOCKCELL_LEVEL=level
            ),
            flush=True,
        )
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=sys", "-m", "not slow"]
    print("tests at these levels on 1, 2, 3 and 8 threads:", end=" ", flush=True)
    print(sanitized.run_successfully("-m", "pytest", *options, "-k", TEST_SELECTION, *find_test_files(folder)))


def leave_out_barriers(folder: Path) -> list[str]:
    """Give every barrier a number by which it can be left out; return the file and the function of each."""
    (folder / "pyx" / "left_out.pxd").write_text(LEFT_OUT_PXD)
    places: list[str] = []
    for path in sorted((folder / "pyx").rglob("*.p*")):
        source = path.read_text()

        def numbered(match: re.Match[str], path: Path = path, source: str = source) -> str:
            """Return the source of a barrier that is left out if the environment says its number."""
            function = re.findall(r"^cdef .*?(\w+)\(", source[: match.start()], re.MULTILINE)[-1]
            places.append(f"{path.name} {function}")
            return f"{match[1]}if not left_out({len(places) - 1}): {match[2]}"

        instrumented = BARRIER.sub(numbered, source)
        if instrumented != source:
            first_cimport = re.compile(r"^(?=from [\w.]+ cimport)", re.MULTILINE)
            path.write_text(first_cimport.sub("from left_out cimport left_out\n", instrumented, count=1))
    assert places
    return places


def check_threads() -> None:
    """Find every barrier that is left out, and two calls that write to one array; then run races.py."""
    folder = copy_source("tsan")
    places = leave_out_barriers(folder)
    print(build(folder, "-fsanitize=thread", b"__tsan_init"), flush=True)
    # gcc's own OpenMP runtime does not tell the sanitizer where teams of threads begin and end; LLVM's does, by archer.
    runtime = library_path("libomp.so.5")
    archer = runtime.with_name("libarcher.so")
    if not archer.exists():
        sys.exit(f"there is no {archer}: {INSTALL}")
    sanitized = Sanitized(
        folder,
        LD_PRELOAD=f"{library_path('libtsan.so')} {runtime}",
        OMP_TOOL_LIBRARIES=str(archer),
        TSAN_OPTIONS="ignore_noninstrumented_modules=1:halt_on_error=1:history_size=7",
    )
    unnoticed_barriers: Counter[str] = Counter()
    for number, place in enumerate(places):
        family = FAMILIES.get(place.split()[0], "")
        result = sanitized.run("tools/races.py", family, BARRIER_LEFT_OUT=str(number), BLOCKCELL_LEVEL="base")
        if REACHED not in result.stdout:
            sys.exit(f"races.py does not get to barrier {number}, in {place}")
        if RACE not in result.stdout:
            unnoticed_barriers[place] += 1
    if unnoticed_barriers != Counter(SPARE):
        sys.exit(f"barriers that were left out and not missed: {dict(unnoticed_barriers)}; expected {SPARE}")
    sanitized.expect_report("two calls that write to the same array", RACE, "-c", SHARED_OUTPUT)
    spare = sum(SPARE.values())
    print(
        f"found: each of {len(places)} barriers left out but {spare} spare ones, two calls that write to one array",
        flush=True,
    )
    for level in sanitized.levels:
        print(sanitized.run_successfully("tools/races.py", BLOCKCELL_LEVEL=level), flush=True)


if __name__ == "__main__":
    start = time.perf_counter()
    {"memory": check_memory, "threads": check_threads}[sys.argv[1]]()
    print(f"nothing else found; {time.perf_counter() - start:.0f} s in all")
