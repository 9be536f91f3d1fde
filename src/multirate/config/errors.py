"""The one error type for users' mistakes."""


class MultirateError(ValueError):
    """A mistake that the user can mend.

    The message names the value, what is allowed and the fix. The command line prints it without a
    traceback and exits with code 2.
    """
