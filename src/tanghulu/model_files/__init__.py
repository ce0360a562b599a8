"""Files of a model as its makers publish them: the parts that need no torch, shared by conductors and workers."""
