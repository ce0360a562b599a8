"""Hit-rate curves: the share of prompt tokens that would be cached with less or more memory."""
