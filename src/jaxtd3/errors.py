"""One way to say that a name is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user asked for: shown as one line, exit code 2."""


def nearest(what: str, given: str, known: Iterable[str]) -> str:
    """'unknown env 'Cartpol': did you mean CartpoleBalance?', or the list when nothing is near."""
    known = list(known)
    folded = {name.casefold(): name for name in known}
    text = str(given).casefold()
    close = [name for name in folded if text and name.startswith(text)]  # cut short
    close = close or difflib.get_close_matches(text, folded, n=1, cutoff=0.5)
    if close:
        return f"unknown {what} {given!r}: did you mean {folded[close[0]]!r}?"
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f"unknown {what} {given!r}: known are {listed}"
