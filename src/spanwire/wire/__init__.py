"""PURE codecs that transports share: bytes in, events or chunks out. No I/O."""
