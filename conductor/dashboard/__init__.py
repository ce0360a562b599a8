"""The page /dashboard: what the conductor and its cluster are doing, live, for people."""
