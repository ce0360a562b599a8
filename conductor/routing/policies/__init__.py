"""Where a request goes: pure policies under one contract; see ``base``."""
