"""A compiled function that runs in several threads, which meet where one needs what another computes.

The function is compiled by itself, and a kernel calls it by its address, in each thread. In the kernel, numba would
compile all its code three times.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, get_num_threads, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

_YIELD_AFTER = 256  # pauses; 7 us on Zen 4. With 4,096, a step beside busy programs takes up to twice as long
_GIVE_UP_AFTER = 2**32  # pauses; two minutes on Zen 4
COUNTER = 8  # elements of a counter: counters are in different lines of the caches
# How often a thread of numba looks for its next call before it sleeps: for 0.15 ms on Zen 4.
_SPINS = 10_000


def sleep_between_steps() -> None:
    """Let numba's threads sleep soon after a call. Otherwise they spin for 4 ms, and take a core that other services
    need between two steps. Call this before anything is compiled, if each step is one call.

    numba loads its own copy of OpenMP, which reads the environment once. torch's threads keep their settings."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)
        get_num_threads()  # loads it
        del os.environ["GOMP_SPINCOUNT"]


def run_threads(function: Any, like: Any, arguments: Any, numbers: Any, threads: int) -> None:
    """Call the function at this address in each thread: (like, arguments, numbers, thread, threads). The first
    three are pointers."""
    for thread in prange(threads):
        _call(function, like, arguments, numbers, thread, threads)


@njit(inline="always")
def meet(arrived: Any, threads: int, meetings: int) -> int:
    """Wait for all threads. Returns the number of meetings so far, this one included."""
    meetings += 1
    if threads > 1:
        add_one(arrived, 0)
        pauses = 0
        while _num_arrived(arrived) < threads * meetings and not arrived[1]:
            _pause()
            pauses += 1
            if pauses % _YIELD_AFTER == 0:  # the other thread may need this core
                _let_others_run()
            if pauses == _GIVE_UP_AFTER:  # OpenMP runs the threads one after another
                arrived[1] = 1
    return meetings


@njit(inline="always")
def new_counters(threads: int) -> Any:
    """How many units of each thread's share have been taken so far."""
    counters = np.empty(threads * COUNTER, np.int64)
    for place in range(len(counters)):  # np.zeros() would run in all threads, and wake them for that
        counters[place] = 0
    return counters


@njit(inline="always")
def shared_work(counters: Any, thread: int, threads: int) -> Any:
    """A thread's view of work that all threads share: the argument of next_unit()."""
    # Of each counter what it was when the current work began, then how many shares this thread has seen to their end.
    # The index of a parallel loop is unsigned. For this type, numba would compile each function that gets it again.
    return counters, np.zeros(threads + 1, np.int64), np.intp(thread), threads


@njit(fastmath=False)  # not inline: that would compile it many times
def next_unit(work: Any, units: int) -> int:
    """A unit of `units` that no thread has begun: of this thread's own share, then of the others', because the system
    may run something else instead of them. -1: none is left. The threads must meet before they begin the next work."""
    counters, began, thread, threads = work
    unit = -1
    while unit < 0 and began[threads] < threads:
        owner = (thread + began[threads]) % threads
        first, last = units * owner // threads, units * (owner + 1) // threads
        unit = first + add_one(counters, owner * COUNTER) - began[owner]
        if unit >= last:  # each thread counts once too far, and knows that the others do
            began[owner] += last - first + threads
            began[threads] += 1
            unit = -1
    if unit < 0:
        began[threads] = 0
    return unit


@njit(inline="always")
def array_at(address: int, size: int, like: Any) -> Any:
    """The array of `size` elements at an address, of the type of the array `like`."""
    return carray(_pointer(address, like), (size,))


@intrinsic
def _pointer(_context: Any, _address: Any, like: Any) -> Any:
    """In a kernel: an address, as a pointer to elements of the type of the array `like`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.intp, like), build


@intrinsic
def _call(
    _context: Any, _function: Any, _like: Any, _arguments: Any, _numbers: Any, _thread: Any, _threads: Any
) -> Any:
    """In a kernel: call the function at an address, with the arguments of run_threads(). Pointers are addresses."""

    def build(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 5)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), build


@intrinsic
def add_one(_context: Any, array: Any, place: Any) -> Any:
    """In a kernel: add 1 to an element of an int64 array, after everything that this thread has written. Returns what
    it was before."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [arguments[1]]), ir.IntType(64)(1), "acq_rel")

    return types.int64(array, types.intp), build


@intrinsic
def _num_arrived(_context: Any, arrived: Any) -> Any:
    """In a kernel: an int64 array's first element, before everything that this thread reads later."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(data, "acquire", 8)

    return types.int64(arrived), build


@intrinsic
def _pause(_context: Any) -> Any:
    """In a kernel: tell the processor that this thread only waits."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _let_others_run(_context: Any) -> Any:
    """In a kernel: the operating system may run another thread on this core (sched_yield)."""

    def build(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), build
