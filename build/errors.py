"""What the compiler raises when the user, the machine or a source package has to change something."""

from __future__ import annotations


class BuildError(Exception):
    """The build cannot go on; the text says what came, what was expected and the fix."""
