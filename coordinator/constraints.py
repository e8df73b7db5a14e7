"""Answers that must follow a grammar: what the coordinator needs of a grammar library, and each request's place in it.

A grammar is compiled beside the loop, and its request joins the queue once that is done. After each of its tokens it is
known which may come next, as a mask that goes to the ranks with the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.coordinator.errors import InputError

if TYPE_CHECKING:
    from paceline.coordinator.request import Request

Mask = bytes
"""A bit a token id, set where the token may come next: byte id // 8, bit id % 8, padded to whole 32-bit words."""

COMPILE_WAIT = 0.005
"""Seconds for which a loop without other work waits for a grammar before it looks after other things."""


class GrammarError(RuntimeError):
    """A grammar that cannot be followed (any further), though nothing is wrong with the engine."""


class Grammars(Protocol):
    """A grammar library over one model's tokenizer. What it calls a matcher means nothing to the coordinator."""

    def compile(self, grammar: str) -> Future[tuple[object, Mask]]:
        """Begin to compile a grammar: a matcher for one answer, and the mask of its first token, or GrammarError.

        The model's end-of-text ids are in a mask exactly where the answer may end.
        """

    def advance(self, steps: Sequence[tuple[object, int]]) -> Sequence[Mask | GrammarError]:
        """Move each of these matchers past the token that was chosen; the masks of the tokens that follow."""


@dataclass(slots=True)
class Constraint:
    """A request's place in its grammar."""

    matcher: object
    mask: Mask
    """Of the next token, less the ids that the request may not choose now."""
    error: str = ""
    """Why the grammar cannot be followed any further."""

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ends here: `error`, or `stop` where no token may come next."""
        if self.error:
            return "error"
        return None if self.mask.count(0) < len(self.mask) else "stop"


class Constraints:
    """The grammars of a coordinator's requests."""

    def __init__(self, grammars: Grammars | None) -> None:
        """grammars: None where there is no tokenizer, so that no request can have a grammar."""
        self._grammars = grammars
        self._compiling: dict[Request, Future[tuple[object, Mask]]] = {}

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._compiling)

    def begin(self, request: Request, grammar: str) -> None:
        """Have a request's grammar compiled. Raises InputError where the model cannot follow any."""
        self._compiling[request] = self._library().compile(grammar)

    def drop(self, request: Request) -> bool:
        """Forget a request whose grammar is being compiled; False where there is none."""
        future = self._compiling.pop(request, None)
        if future is None:
            return False
        future.cancel()
        return True

    def wait(self) -> None:
        """Return once a grammar is compiled, or after a moment."""
        wait(self._compiling.values(), COMPILE_WAIT, FIRST_COMPLETED)

    def take_compiled(self) -> list[Request]:
        """The requests whose grammars have been compiled, now with their constraint."""
        ready = [request for request, future in self._compiling.items() if future.done()]
        for request in ready:
            try:
                matcher, mask = self._compiling.pop(request).result()
                request.constraint = Constraint(matcher, _without(mask, request.barred_ids))
            except GrammarError as error:
                request.constraint = Constraint(None, b"", str(error))
        return ready

    def advance(self, requests: Sequence[Request]) -> None:
        """Take in the last token of each of these requests, all of which have a constraint and go on."""
        if not requests:
            return
        constraints = [request.constraint for request in requests if request.constraint is not None]
        steps = [(each.matcher, request.token_ids[-1]) for each, request in zip(constraints, requests, strict=True)]
        masks = self._library().advance(steps)
        for request, constraint, mask in zip(requests, constraints, masks, strict=True):
            if isinstance(mask, GrammarError):
                constraint.error = str(mask)
            else:
                constraint.mask = _without(mask, request.barred_ids)

    def _library(self) -> Grammars:
        if self._grammars is None:
            raise InputError("grammar needs a tokenizer, and the model's folder has none")
        return self._grammars


def _without(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """The mask with these ids left out."""
    cleared = bytearray(mask)
    for token in token_ids:
        cleared[token >> 3] &= ~(1 << (token & 7))
    return bytes(cleared)
