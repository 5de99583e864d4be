"""Text of other machines, for a terminal."""

__all__ = ["printable"]


def printable(text: str) -> str:
    """Text that a peer chose, without characters that move the cursor or colour the screen."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
