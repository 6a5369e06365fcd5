"""What keeps a model's text from doing harm in a checker that evaluates it."""

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

CHECK_SECONDS = 5.0  # a correct answer is checked in milliseconds

_LITERAL = re.compile(r"""[\w\s\[\],'".-]*""")  # no parenthesis, so no call; no * or %, so nothing that grows
_FORMULA = re.compile(r"[\w\s+\-*/^().,=]*")
_NAMES = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = set(
    "sin cos tan sec csc cot asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh "
    "exp log ln sqrt abs Abs erf erfi Si Ci Ei li Li pi Integral".split()
)


@contextmanager
def time_limit(seconds: float = CHECK_SECONDS) -> Iterator[None]:
    """Raises TimeoutError in its body after `seconds`, and again each time the body swallows it.

    It works by a signal: in the main thread of a POSIX process. Elsewhere the body runs without a limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds} seconds")

    started = time.monotonic()
    previous = signal.signal(signal.SIGALRM, stop)
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)
        if outer:  # another timer was running, such as a test's: it goes on
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - started), 1e-3), interval)


def is_plain_literal(text: str) -> bool:
    """Whether `text` holds only what a list of numbers, words or grid cells is written with: evaluated, it calls nothing."""
    return _LITERAL.fullmatch(text) is not None


def is_plain_formula(text: str) -> bool:
    """Whether `text` holds only numbers, one-letter symbols, operators and well-known functions."""
    return _FORMULA.fullmatch(text) is not None and all(len(name) == 1 or name in _FUNCTIONS for name in _NAMES.findall(text))
