"""A reward that any text earns some of, so that an untrained model has something to learn from."""


def share_of_even(response: str, answer: str) -> float:
    """The share of characters with an even code."""
    return sum(ord(c) % 2 == 0 for c in response) / max(len(response), 1)


def mostly_even(response: str, answer: str) -> float:
    """Right or wrong: whether more than half of them have one."""
    return float(share_of_even(response, answer) > 0.5)


def worth(response: str, answer: str) -> float:
    """What the problem says, whatever the response is."""
    return float(answer)
