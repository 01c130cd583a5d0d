"""The characters that stand for bytes in byte-level vocabularies, as GPT-2 introduced them."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + n): b for n, b in enumerate(others)}}


BYTE_OF = _alphabet()
_CHARACTERS = "".join(sorted(BYTE_OF, key=BYTE_OF.__getitem__))


def spell(data: bytes) -> str:
    """Bytes as a vocabulary writes them, one character each."""
    return data.decode("latin-1").translate(_TABLE)


_TABLE = dict(enumerate(_CHARACTERS))
