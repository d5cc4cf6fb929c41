"""How pairs are scored: exact cosines, which pairs, tile by tile, and the stores that scores end up in."""
