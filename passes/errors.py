"""Errors of the compiler."""


class PassError(RuntimeError):
    """A pass, a pipeline or a graph that breaks a rule of the compiler.

    Fix: change or leave out the pass that the message names; for a built-in pass, report the message.
    """
