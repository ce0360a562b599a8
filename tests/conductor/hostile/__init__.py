"""Bodies and headers made to hold up the conductor or to fill its memory."""
