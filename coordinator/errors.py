"""The errors a person sees: each message is one line that says what to change."""


class InputError(ValueError):
    """A request, option or setting that cannot be carried out as given."""


class EngineError(RuntimeError):
    """The engine itself failed (a rank died, a channel broke); requests in flight are lost."""
