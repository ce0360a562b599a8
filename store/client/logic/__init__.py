"""The decisions of the client as generators without I/O: they yield effects, the drivers perform them."""
