"""People are told when kernels have to be compiled first."""

import threading

import numba

from shardwright.planner.solver.compilation import compilation_told


def test_compiling_a_kernel_is_told_once_and_running_one_is_not() -> None:
    told: list[str] = []
    double, triple = (numba.njit(lambda x, k=k: k * x) for k in (2, 3))
    with compilation_told(lambda: told.append("first")):
        assert (double(2), triple(2), double(2)) == (4, 6, 4)
    with compilation_told(lambda: told.append("again")):
        double(2)
    assert told == ["first"]


def test_other_threads_tell_nothing() -> None:
    told: list[str] = []
    half = numba.njit(lambda x: x / 2)
    with compilation_told(lambda: told.append("compiled")):
        thread = threading.Thread(target=half, args=(2.0,))
        thread.start()
        thread.join()
    assert told == []
