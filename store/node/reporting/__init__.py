"""How a node tells the master of itself: registration, and reports of what it holds."""
