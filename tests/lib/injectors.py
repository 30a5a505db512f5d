"""Scenarios that are stopped in the middle: at the n-th allocation, or the n-th place where Ctrl-C may strike.

The call must then raise the expected error or give the right result. The object must be as it was before or as it
should be after, and go on accordingly.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
import re
import sys
import traceback
from collections.abc import Callable
from dis import opname
from typing import Any

from scenarios import GROUPS, Expected, Scenario

import blockcell


class Allocations:
    """The n-th allocation of Python's own allocator fails, with a MemoryError."""

    error: type[BaseException] = MemoryError

    def arm(self, n: int) -> None:
        import _testcapi

        self.n, self.release = n, _testcapi.remove_mem_hooks
        _testcapi.set_nomemory(n - 1, n)

    def disarm(self) -> bool:
        """Whether the n-th was reached; otherwise one of the next allocations fails."""
        try:
            for _ in range(self.n + 100):
                object()
            return True
        except MemoryError:
            return False
        finally:
            self.release()


class Mallocs:
    """The n-th allocation of this thread by the C library gives NULL; large arrays and scratch come from there."""

    error: type[BaseException] = MemoryError

    def __init__(self) -> None:
        shim = ctypes.CDLL(None)
        self.begin, self.end = shim.malloc_fails_at, shim.mallocs_seen
        self.begin.argtypes, self.end.restype = [ctypes.c_long], ctypes.c_long

    def arm(self, n: int) -> None:
        self.n = n
        self.begin(n)

    def disarm(self) -> bool:
        return bool(self.end() >= self.n)


class Interrupts:
    """KeyboardInterrupt at the n-th place where Python looks for signals: after calls and at the ends of loops."""

    error: type[BaseException] = KeyboardInterrupt
    CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")

    def arm(self, n: int) -> None:
        self.left, self.before = n, {}  # type: ignore[var-annotated]
        sys.settrace(self.trace)

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "return":
            self.before.pop(frame, None)
        elif event == "opcode" and self.left > 0:
            before = self.before.get(frame, "")
            self.before[frame] = opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(self.CHECKS):
                self.left -= 1
                if self.left == 0:
                    raise self.error
        return self.trace

    def disarm(self) -> bool:
        sys.settrace(None)
        self.before = {}
        return self.left == 0


class Errors(Interrupts):
    """MemoryError at those places, for code whose own allocations must not fail: protobuf would crash."""

    error = MemoryError


INJECTORS: dict[str, type[Any]] = {
    "allocations": Allocations, "mallocs": Mallocs, "interrupts": Interrupts, "errors": Errors
}  # fmt: skip


def attempt(injector: Any, n: int, act: Callable[[], Any]) -> tuple[bool, bool, Any]:
    """Make a call; return whether the n-th place was reached, whether the call failed, and its result if not."""
    failed, reached, result = True, True, None
    try:
        try:
            injector.arm(n)
            result = act()
            failed = False
        finally:
            reached = injector.disarm()
    except injector.error:
        pass
    except Exception as error:
        if not stands_for(error, injector.error):
            raise
    return reached, failed, result


def stands_for(error: BaseException, kind: type[BaseException]) -> bool:
    """Return whether Python or numpy raised this error because of one of that kind, as some of their functions do."""
    texts = {
        RuntimeError: r"can't allocate .*lock",
        SystemError: "^(?!<cyfunction).*exception",  # of other functions than ours
        pickle.PicklingError: "import of module .* failed",
        TypeError: "not PosixPath$",
        AttributeError: r"^'numpy\.dtypes",
    }
    if any(isinstance(error, type_) and re.search(text, str(error)) for type_, text in texts.items()):
        return True
    while error.__context__ is not None and error.__cause__ is None:
        error = error.__context__
    return isinstance(error, kind)


def inject(injector: Any, scenario: Scenario, name: str, count: int, seed: int = 0) -> str:
    """Try every n, or `count` of them, and say how many errors there were."""
    for _ in range(1 if count else 3):  # what is made once is made here; after three, the places stay the same
        expected = Expected(scenario)

    def reached(n: int) -> bool:
        os.write(2, f"{name}: {n}\n".encode())  # the last words before a crash
        subject = scenario.make()
        hit, failed, result = attempt(injector, n, lambda: scenario.act(subject))
        errors.append(failed)
        expected.check(subject, failed, result)
        if n % 100 == 0:
            gc.collect()  # it is disabled, and all attempts would stay
        return hit

    errors: list[bool] = []
    if not count:
        n = missed = 0
        while missed < 3:  # one is not enough: what Python keeps for reuse differs from run to run
            n += 1
            missed = 0 if reached(n) else missed + 1
        return f"{name}: {sum(errors)} errors at {n} places"
    last = 1
    while reached(last):
        last *= 4
    places = range(1, last + 1)
    for n in places if last <= count else sorted(random.Random(seed).sample(places, count)):
        reached(n)
    return f"{name}: {sum(errors)} errors at {len(errors)} places of up to {last}"


def disturb(fault: str, groups: str, count: str = "0", threads: str = "2", third: str = "") -> None:
    """Inject into all scenarios of groups, or into those of their first, second or last third, drawn at random."""
    gc.disable()
    blockcell.set_num_threads(int(threads))
    injector, failures = INJECTORS[fault](), []
    scenarios = [item for group in groups.split(",") for item in GROUPS[group]().items()]
    if third:
        scenarios = random.Random(0).sample(scenarios, len(scenarios))[int(third) :: 3]
    for name, scenario in scenarios:
        if not (scenario.crashes_numpy and fault == "allocations"):
            try:
                print(inject(injector, scenario, name, int(count)), flush=True)
            except Exception as error:  # the other scenarios are tried all the same
                failures.append(f"{name}: {error!r}")
                traceback.print_exc()
    assert not failures, "\n".join(failures)
