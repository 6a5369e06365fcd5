"""The one kind of error that a user can mend."""


class UsageError(ValueError):
    """Bad input: the command line shows its text as one line and exits with code 2.

    The text names the dotted key (or file and line), the value, the constraint and what to do.
    """
