"""The one exception that means "the user's input is wrong".

The command line turns it into one message and exit code 2; every other exception is a fault of ours and shows its
traceback. It is a ``ValueError``, so library users need not know it.
"""


class InputError(ValueError):
    """A value the user gave cannot be used. The message names the value, the limit and the remedy."""


class ToldElsewhereError(InputError):
    """The user's input is wrong, and another process of the run tells; this one only ends, with exit code 2."""
