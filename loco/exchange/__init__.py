"""How entries travel: gathered, or summed by slices and sent back; frame by frame."""
