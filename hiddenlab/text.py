"""Text that is safe to print and to show."""


def visible(text: str) -> str:
    """Text with its control characters as pictures, safe to print: no escapes, no reversed reading order."""
    out = []
    for char in text:
        code = ord(char)
        if char == "\n":
            out.append("↵")
        elif char == "\t":
            out.append("⇥")
        elif code < 0x20 or code == 0x7F:
            out.append(chr(0x2400 + code) if code < 0x20 else "\u2421")
        elif (
            0x80 <= code < 0xA0
            or 0x202A <= code <= 0x202E
            or 0x2066 <= code <= 0x2069
            or code in (0x2028, 0x2029)
        ):
            out.append("\ufffd")
        else:
            out.append(char)
    return "".join(out)
