"""Stop texts in a response that grows by a token at a time."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_MARGIN = 4  # tokens: a decoder may treat the first ones of what it is given otherwise (a leading space, half a character)


class StopTexts:
    """Whether the text of a response holds one of `stops`, asked after each of its tokens.

    It depends on the response's tokens alone, so every rank answers alike. Text is decoded only where the newest token can end
    a stop: first the end of the response, as much as a stop can reach back, and all of it where that end holds one.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops, self._decode = stops, decode
        self._lasts = {stop[-1] for stop in stops}
        # a token that has a text has a byte of it at least
        self._reach = max(len(stop.encode()) for stop in stops) + _MARGIN
        self._silent: dict[int, bool] = {}
        self._may_end: dict[int, bool] = {}

    def end(self, response: Sequence[int]) -> bool:
        """Whether it ends here: that the tokens before the last did not hold a stop is known."""
        if not self._can_end_with(response[-1]):
            return False
        start, text = self._tail(response)
        found = self._holds(text)
        for _ in range(3):  # the tail may begin within a character of up to four tokens
            if found or not start or not text.startswith(_UNDECODED):
                break
            start -= 1
            text = self._decode(response[start:])
            found = self._holds(text)
        return found and (not start or self._holds(self._decode(response)))

    def _can_end_with(self, token: int) -> bool:
        """Whether a token has the last character of a stop, or a part of some character."""
        if token not in self._may_end:
            text = self._decode([token, token])  # alone, a leading space may have no text
            self._may_end[token] = not self._lasts.isdisjoint(text) or _UNDECODED in text
        return self._may_end[token]

    def _tail(self, response: Sequence[int]) -> tuple[int, str]:
        start, spoken = len(response), 0
        while start and spoken < self._reach:
            start -= 1
            spoken += not self._is_silent(response[start])
        return start, self._decode(response[start:])

    def _is_silent(self, token: int) -> bool:
        """Whether a token has no text of its own, as special ones."""
        if token not in self._silent:
            self._silent[token] = not self._decode([token])
        return self._silent[token]

    def _holds(self, text: str) -> bool:
        return any(stop in text for stop in self._stops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to where the first of `stops` begins, all of it where it holds none."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
