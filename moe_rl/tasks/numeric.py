"""The number that a text ends in or marks as its answer, exactly, as a person would read it."""

import re
from dataclasses import dataclass
from fractions import Fraction

RELATIVE_TOLERANCE = Fraction(1, 10**6)

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_])(?<![0-9]\.)"  # not inside a word or behind another number's point: the 2 of x2, the 1 of 1.0.1
    rf"(?P<sign>(?<![0-9)\]%])[+-])?[$€£]?"  # 7-3 is 7 and 3
    rf"(?:(?:(?P<whole>{_WHOLE}) )?(?P<top>{_WHOLE}) ?/ ?(?P<bottom>{_WHOLE})(?![0-9]|\.[0-9])|(?P<decimal>{_DECIMAL}))"
    r"(?P<percent> ?\\?%)?"
)
_MARKED = re.compile(r"####[ \t]*(\S.*?)[ \t.]*$", re.MULTILINE)  # GSM8K: `#### 72`, at the end of a line
_LONGEST = 400  # digits; longer ones are noise, and slow


@dataclass(frozen=True)
class Number:
    """value: as written, so that 50% has the value 50; percent: whether a percent sign follows."""

    value: Fraction
    percent: bool = False


def last_number(text: str) -> Number | None:
    """The last number in `text`, None without one.

    Read are signs (also the typographic minus), thousands separated by commas (1,234.5), decimals with a point, exponents
    of up to three digits (1.5e3), fractions (3/4, 1 3/4), a currency sign in front and a percent sign behind. Not read:
    a decimal comma, words, LaTeX. A fraction over zero and a number of over 400 characters are no numbers.
    """
    matches = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not matches or len(matches[-1][0]) > _LONGEST:
        return None
    last = matches[-1]
    parts = {name: Fraction((last[name] or "0").replace(",", "")) for name in ("decimal", "whole", "top", "bottom")}
    if last["decimal"]:
        value = parts["decimal"]
    elif parts["bottom"] == 0:
        return None
    else:
        value = parts["whole"] + parts["top"] / parts["bottom"]
    return Number(-value if last["sign"] == "-" else value, percent=last["percent"] is not None)


def answered_number(text: str) -> Number | None:
    """The number on the last line that ends with `####` and a number, as GSM8K marks an answer, whatever follows it; without
    such a line the last number. `#### 2. Next` is a heading."""
    for marked in reversed(_MARKED.findall(text)):
        found = _NUMBER.fullmatch(marked.replace("\N{MINUS SIGN}", "-"))
        if found and (number := last_number(marked)):
            return number
    return last_number(text)


def after_mark(text: str) -> str:
    """What stands behind `####` on a text's last line, where that begins so, else the text."""
    last = text.rstrip().rpartition("\n")[2].lstrip()
    return last.removeprefix("####").strip() if last.startswith("####") else text


def equal(ours: Number, theirs: Number) -> bool:
    """Whether two numbers are the same: whole ones exactly, others within 1e-6 of `theirs`, relatively.

    If just one has a percent sign, it may stand for the number as written or for a hundredth of it: 50% equals 50 and 0.5.
    """
    if _close(ours.value, theirs.value):
        return True
    if ours.percent == theirs.percent:
        return False
    scale = Fraction(1, 100)
    return _close(ours.value * (scale if ours.percent else 1), theirs.value * (scale if theirs.percent else 1))


def _close(ours: Fraction, theirs: Fraction) -> bool:
    if ours.denominator == theirs.denominator == 1:
        return ours == theirs
    return abs(ours - theirs) <= RELATIVE_TOLERANCE * abs(theirs)
