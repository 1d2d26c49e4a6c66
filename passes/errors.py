"""Errors of the compiler."""


class PassError(RuntimeError):
    """A pass, a pipeline or a graph breaks a rule; the message names which, what was found and what to do."""
