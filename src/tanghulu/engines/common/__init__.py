"""What every connector needs: names of blocks, decisions apart from I/O, and the transfers; no engine, no torch."""
