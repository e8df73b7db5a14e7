"""Where the host's time of a step goes, and how large steps are; measured always, about 2 µs a step."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.coordinator.distribution import Distribution

_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""From a plan without work to a prompt on a slow CPU."""
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (*_REQUESTS, 2048, 4096, 8192, 16384)


class StepTimes:
    """Distributions over all steps so far.

    The parts of a step follow each other on one thread. With a GPU the device works beside them, and `wait` is all the
    time for which the host had nothing better to do; on the CPU the step itself is computed in `launch`.
    """

    def __init__(self) -> None:
        self.plan = Distribution(_SECONDS)
        """Deciding what to run."""
        self.launch = Distribution(_SECONDS)
        """Sending the plan to the other ranks, and starting it here."""
        self.wait = Distribution(_SECONDS)
        """For the result, from when it was asked for."""
        self.apply = Distribution(_SECONDS)
        """Giving sampled tokens to their requests, and ending those that are finished."""
        self.deliver = Distribution(_SECONDS)
        """Handing the news to the HTTP process; nothing without one."""
        self.requests = Distribution(_REQUESTS)
        """Requests in a step."""
        self.tokens = Distribution(_TOKENS)
        """Tokens computed in a step."""

    def parts(self) -> Mapping[str, Distribution]:
        """Copies of the distributions of seconds, by the name of the part, in the order of the parts."""
        names = ("plan", "launch", "wait", "apply", "deliver")
        return {name: getattr(self, name).copy() for name in names}
