"""Processor time and memory of running processes, with their children."""

import contextlib
import time

import psutil


def family(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants that run at this moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def spent(pid: int) -> float:
    """Return the processor seconds of a process and its descendants, including ended ones.

    The clock of a process counts nanoseconds; `/proc` counts hundredths of a second.
    """
    seconds = 0.0
    for process in family(pid):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            ended = process.cpu_times()
            seconds += time.clock_gettime(~process.pid << 3 | 2) + ended.children_user + ended.children_system
    return seconds


def memory(pid: int) -> float:
    """Return the megabytes of a process and its descendants, shared pages in proportion (PSS)."""
    total = 0
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 10**6
