"""What travels, to the byte: headers, codecs, framing, and why a round is refused."""
