"""Huge pages for the weights and the KV pool.

A step takes nearly as long as it takes to read the weights (few rows) or the keys and values (many rows). With pages of
4 KiB, a core spends a part of that time on finding where the pages are, and in a virtual machine that takes longer
still."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from services.runtime.logs import get_logger

_log = get_logger(__name__)

_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# Gaps that malloc leaves between matrices. Memory in larger ones would be used for nothing.
_GAP_BYTES = 1 << 20


def use_huge_pages(arrays: list[np.ndarray]) -> None:
    """Move the memory of these arrays to huge pages, where Linux can, and log how much of it. Their addresses stay.
    Takes 3 s per GiB."""
    began_s, moved, reason = time.monotonic(), 0, ""
    try:
        if "[never]" in (_SETTINGS / "enabled").read_text():
            raise OSError(f"{_SETTINGS / 'enabled'} says never")
        size = int((_SETTINGS / "hpage_pmd_size").read_text())
        for begin, end in whole_pages(arrays, size):
            if _collapse(begin, end):
                moved += end - begin
                continue
            for page in range(begin, end, size):  # Linux has stopped at the first that it cannot move
                moved += size * _collapse(page, page + size)
        if not moved:
            raise OSError("Linux moves no page to a huge one; it can since 6.1")
    except (AttributeError, OSError) as error:  # another system, an old Linux, or no memory
        reason = str(error)
    num_bytes = sum({array.ctypes.data: array.nbytes for array in arrays}.values())  # a tied head is the embedding
    fields = {"mib": moved >> 20, "of": num_bytes >> 20, "seconds": round(time.monotonic() - began_s, 1)}
    _log.info("weights in huge pages", **fields, **({"reason_for_small_pages": reason} if reason else {}))


def begin_in_huge_pages(tensor: Tensor) -> None:
    """Let Linux take huge pages for the memory of a new tensor when it is first written. This costs no time."""
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < end:
            _advise(begin, end, mmap.MADV_HUGEPAGE)  # no error is of interest: without huge pages, small ones serve


def _collapse(begin: int, end: int) -> bool:
    """Move this memory to huge pages. False: a part of it cannot, such as one of two mappings, or not now. Raises
    OSError without memory, and AttributeError on another system."""
    number = _advise(begin, end, _COLLAPSE)
    if number in (0, errno.EINVAL, errno.EAGAIN):
        return number == 0
    raise OSError(number, os.strerror(number))


def _advise(begin: int, end: int, advice: int) -> int:
    """Give Linux an advice about this memory. Returns the number of the error; 0: none."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    return ctypes.get_errno() if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) else 0


def whole_pages(arrays: Iterable[np.ndarray], size: int) -> list[tuple[int, int]]:
    """Ranges of the arrays' memory in whole pages of `size` bytes: the first address, and the one behind it. A page may
    hold several arrays, so arrays side by side are one range."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays):
        if joined and begin <= joined[-1][1] + _GAP_BYTES:
            first, last = joined.pop()
            joined.append((first, max(last, end)))
        else:
            joined.append((begin, end))
    ranges = [(-(-begin // size) * size, end // size * size) for begin, end in joined]
    return [(begin, end) for begin, end in ranges if begin < end]
