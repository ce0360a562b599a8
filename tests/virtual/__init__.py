"""Virtual time: an event loop, a network and threads in it, for simulations that run production classes."""
