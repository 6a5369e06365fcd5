"""Memory of a process that handles one tensor after the other."""

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def free_tensors_at_once() -> None:
    """Gives the memory of tensors of 1 MB and more back to the system when they are freed, in this process from now on.

    glibc by itself keeps blocks of up to 32 MB once the first was freed, and finds room for an aligned one only in a larger
    gap: 30 tensors of 20 MB, one at a time, with small things made between them, came to 580 MB. A trainer, which makes the
    same tensors again and again, is better off that way. Elsewhere than on glibc this does nothing.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, 1 << 20)
